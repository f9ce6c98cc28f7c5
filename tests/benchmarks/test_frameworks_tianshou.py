"""Steps through tianshou's interface over a hub, beside tianshou's own ``ShmemVectorEnv``.

``pytest -m benchmark -n 0 -s tests/benchmarks/test_frameworks_tianshou.py`` needs ``tianshou``. The ratios are
printed with their targets; they fail no test.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hubs import serve
from turns import tell_ratios

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

SECONDS = 1.0
TARGETS = {16: {"private hub": 2.0, "tcp": 1.2}, 64: {"private hub": 5.0, "tcp": 4.0}}
MAKE = functools.partial(gymnasium.make, "CartPole-v1")


def steps_per_second(envs: Any, with_resets: bool) -> float:
    """Env-steps/s of ``step``; with the resets of envs whose episode has ended, as a collector makes them."""
    num_envs = len(envs)
    ids = np.arange(num_envs)
    actions = np.arange(num_envs) % 2
    envs.reset()
    steps, start_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - start_s) < SECONDS:
        _, _, terminations, truncations, _ = envs.step(actions, ids)
        steps += num_envs
        ended = terminations | truncations
        if with_resets and ended.any():
            envs.reset(ids[ended])
        actions = 1 - actions
    return steps / taken_s


@pytest.mark.filterwarnings("ignore")  # of steps after an episode's end
@pytest.mark.parametrize("with_resets", [False, True], ids=["steps", "steps and resets"])
@pytest.mark.parametrize("num_envs", TARGETS)
def test_tianshou_steps(num_envs: int, with_resets: bool, tmp_path: Path) -> None:
    pytest.importorskip("tianshou")
    from tianshou.env import ShmemVectorEnv

    from envhub.tianshou import HubVectorEnv

    with serve(tmp_path, "CartPole-v1") as hub, contextlib.ExitStack() as stack:
        makes: dict[str, Callable[[], Any]] = {
            "ShmemVectorEnv": lambda: ShmemVectorEnv([MAKE] * num_envs),
            "private hub": lambda: HubVectorEnv([MAKE] * num_envs),
            "tcp": lambda: HubVectorEnv("CartPole-v1", num_envs, hub=hub.tcp, lane="wire"),
        }
        made = {way: make() for way, make in makes.items()}
        for envs in made.values():
            stack.callback(envs.close)
            envs.reset()
        rates = {way: functools.partial(steps_per_second, envs, with_resets) for way, envs in made.items()}
        measure = f"tianshou step, CartPole-v1, {num_envs} envs, {'with' if with_resets else 'without'} resets"
        tell_ratios(measure, rates, "ShmemVectorEnv", TARGETS[num_envs])
