"""What recording takes of the rate of steps, beside the same envs that are not recorded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from turns import tell_ratios

import envhub

SECONDS = 1.0

pytestmark = pytest.mark.benchmark


@pytest.mark.parametrize(("env", "num_envs"), [("CartPole-v1", 64), ("ALE/Pong-v5", 16)])
@pytest.mark.parametrize("what", ["all", "failed", "film"])
def test_recorded_steps(tmp_path: Path, env: str, num_envs: int, what: str) -> None:
    options: dict[str, Any] = {"all": {}, "failed": {"only": "failed"}, "film": {"film": [0]}}[what]
    kwargs: dict[str, Any] = {"render_mode": "rgb_array"} if what == "film" else {}
    record = envhub.RecordOptions(tmp_path, **options)
    with contextlib.closing(envhub.make_vec(env, num_envs, **kwargs)) as plain:
        recorded = envhub.make_vec(env, num_envs, record=record, **kwargs)
        with contextlib.closing(recorded):
            rates = {"not recorded": _rate(plain), "recorded": _rate(recorded)}
            target = 0.9 if what != "film" else 0.0
            tell_ratios(f"{env}, {num_envs} envs, {what}", rates, "not recorded", {"recorded": target})
    print(recorded.recorded)  # type: ignore[attr-defined]


def _rate(envs: envhub.HubVectorEnv) -> Callable[[], float]:
    envs.reset(seed=1)
    actions = [envs.action_space.sample() for _ in range(64)]
    count = 0

    def measure() -> float:
        nonlocal count
        first, began = count, time.perf_counter()
        while time.perf_counter() < began + SECONDS:
            envs.step(actions[count % 64])
            count += 1
        return (count - first) * envs.num_envs / (time.perf_counter() - began)

    return measure
