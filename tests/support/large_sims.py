"""Envs that show much: long texts, large infos, rewards with axes."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

LETTERS = "abcdefgh "
DIE = 1


class Shows(gym.Env[Any, Any]):
    """Shows values of the next size in each step: ``kind`` is text (the observation), info, array or ints."""

    action_space = spaces.Discrete(2)

    def __init__(self, kind: str = "info", sizes: tuple[int, ...] = (1 << 12,)) -> None:
        self.kind, self.sizes, self.count = kind, sizes, 0
        self.observation_space: Any = spaces.Box(0, 1, (2,), np.float32)
        if kind == "text":
            self.observation_space = spaces.Text(max(sizes), charset=LETTERS)
        self._texts = [(letter * max(sizes)) for letter in LETTERS]

    def _shown(self) -> tuple[Any, dict[str, Any]]:
        size = self.sizes[self.count % len(self.sizes)]
        text = self._texts[self.count % len(LETTERS)][:size]
        if self.kind == "text":
            return text, {"count": self.count}
        shown: Any = text
        if self.kind == "array":
            shown = np.full(size // 8, self.count, np.float64)
        elif self.kind == "ints":
            shown = list(range(self.count, self.count + size // 8))
        return np.zeros(2, np.float32), {"shown": shown, "count": self.count}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._shown()

    def step(self, action: Any) -> tuple[Any, ...]:
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        observation, info = self._shown()
        return observation, 0.5, False, False, info


def shows(kind: str = "info", sizes: tuple[int, ...] = (1 << 12,)) -> Shows:
    """An env as a hub serves it."""
    return Shows(kind, tuple(sizes))
