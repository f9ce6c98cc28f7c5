"""An env for hubs in containers, whose steps take as long as its action says."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym


class SlowEnv(gym.Env[int, int]):
    """A step takes as many tenths of a second as the action; the observation counts the steps of the episode."""

    observation_space = gym.spaces.Discrete(1000)
    action_space = gym.spaces.Discrete(1000)
    _steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        time.sleep(int(action) / 10)
        self._steps += 1
        return self._steps, 1.0, False, False, {}

    def close(self) -> None:
        print("the env is closed", flush=True)
