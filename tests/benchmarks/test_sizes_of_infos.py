"""Steps whose infos or texts are large, beside those of ``AsyncVectorEnv``, in one run.

``pytest -m benchmark -n 0 -s tests/benchmarks/test_sizes_of_infos.py``. Ratios are printed with the target; none
fails a test.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from gymnasium.vector import AsyncVectorEnv
from large_sims import Shows
from turns import tell_ratios

import envhub

NUM_ENVS = 4
WARM_STEPS = 20
SECONDS = 0.3
KIB = 1 << 10

pytestmark = pytest.mark.benchmark


@pytest.mark.parametrize("nbytes", [KIB, 4 * KIB, 64 * KIB, 1 << 20])
@pytest.mark.parametrize("kind", ["info", "array", "text", "ints"])
def test_large_values(kind: str, nbytes: int) -> None:
    factories = [partial(Shows, kind, (nbytes,))] * NUM_ENVS
    with contextlib.ExitStack() as stack:
        made: dict[str, Any] = {"AsyncVectorEnv": AsyncVectorEnv(factories, shared_memory=kind != "text")}
        for lane in ("auto", "wire"):
            made[f"lane {lane}"] = envhub.make_vec(factories, num_workers=NUM_ENVS, lane=lane)
        rates = {}
        for name, envs in made.items():
            stack.callback(envs.close)
            envs.reset(seed=1)
            rates[name] = _rate(envs)
        tell_ratios(f"{kind} of {nbytes} bytes", rates, "AsyncVectorEnv", {"lane auto": 1.0, "lane wire": 1.0})


def _rate(envs: Any) -> Callable[[], float]:
    actions = envs.action_space.sample() * 0  # none of which ends the env
    for _ in range(WARM_STEPS):
        envs.step(actions)

    def measure() -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() < began + SECONDS:
            envs.step(actions)
            count += 1
        return count / (time.perf_counter() - began)

    return measure
