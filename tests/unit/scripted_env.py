"""An env whose action says what its next step does, for tests that run it in their own process."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

GO_ON, TERMINATE, TRUNCATE, RAISE, GIVE_NAN, GIVE_INFO, GIVE_LARGE_INFO, LEAVE_THE_SPACE = range(8)
LARGE = "x" * 1000
HIGH = 1000.0


class ScriptedEnv(gymnasium.Env[np.ndarray, int]):
    """Observes its episode and the step in it; the first episode is 1.

    Attributes:
        seeds: of every reset.
        options: of the last reset.
        closed: how often it was closed.
        refuses_reset: the next reset raises.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-HIGH, HIGH, (2,), np.float64)
        self.action_space = spaces.Discrete(8)
        self.episode = self.length = self.closed = 0
        self.seeds: list[int | None] = []
        self.options: Any = None
        self.refuses_reset = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.refuses_reset:
            self.refuses_reset = False
            raise RuntimeError("no reset")
        self.seeds.append(seed)
        self.options = options
        self.episode, self.length = self.episode + 1, 0
        return self.observed(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == RAISE:
            raise RuntimeError("the simulator broke")
        self.length += 1
        seen = self.observed()
        if action == GIVE_NAN:
            seen[1] = np.nan
        if action == LEAVE_THE_SPACE:
            seen[1] = 2 * HIGH
        info = {GIVE_INFO: {"n": self.length}, GIVE_LARGE_INFO: {"text": LARGE}}.get(int(action), {})
        return seen, float(self.length), action == TERMINATE, action == TRUNCATE, info

    def observed(self) -> np.ndarray:
        return np.array([self.episode, self.length], np.float64)

    def close(self) -> None:
        self.closed += 1
