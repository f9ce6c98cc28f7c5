"""What a frame of one of many envs costs, beside what the env itself takes for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from turns import tell_ratios

import envhub

NUM_ENVS = 16
SECONDS = 0.5

pytestmark = pytest.mark.benchmark


class Drawn(gym.Env[np.ndarray, int]):
    """Draws 480 x 480 pixels in 20 ms of CPU time, as a software renderer does."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    render_mode = "rgb_array"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self) -> np.ndarray:  # type: ignore[override]
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return np.full((480, 480, 3), 7, np.uint8)


def test_a_frame_of_one_of_sixteen_envs() -> None:
    own = Drawn()
    with contextlib.closing(envhub.make_vec(Drawn, NUM_ENVS)) as envs:
        envs.reset(seed=0)
        assert envs.render([3])[0].shape == (480, 480, 3)
        rates = {"the env itself": _rate(own.render), "one of 16": _rate(lambda: envs.render([3]))}
        # At most 1.2 times the cost.
        tell_ratios("frames of 480 x 480 pixels", rates, "the env itself", {"one of 16": round(1 / 1.2, 2)})


def _rate(render: Callable[[], Any]) -> Callable[[], float]:
    def measure() -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() < began + SECONDS:
            render()
            count += 1
        return count / (time.perf_counter() - began)

    return measure
