"""Envs that show much: long texts, large infos, rewards with axes."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
from gymnasium import spaces
from sims import Counter

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


class Lives(Shows):
    """Has no action that ends its process."""

    action_space = spaces.Discrete(1)


def shows(kind: str = "info", sizes: tuple[int, ...] = (1 << 12,)) -> Shows:
    """An env as a hub serves it."""
    return Shows(kind, tuple(sizes))


class WithData(Counter):
    """Has data of its own, of which it says the first byte and, in ``held``, how much its process has."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    def first(self) -> int:
        return self.data[0]

    def held(self) -> int:
        """The private memory of this process, in bytes."""
        memory = psutil.Process().memory_full_info()
        return int(memory.uss)

    def act(self, action: int) -> None:
        if action == 1:
            os._exit(3)
        if action == 2:
            raise ArithmeticError("asked for")


class Much(Counter):
    """Ends after two steps; its infos have entries that are too large for a network, and others."""

    def __init__(self) -> None:
        super().__init__(length=2)

    def step(self, action: Any) -> tuple[Any, ...]:
        *found, _ = super().step(action)
        episode = {"r": 0.5, "frames": np.zeros(1 << 21, np.uint8)}
        return *found, {"huge": "x" * (2 << 20), "episode": episode, "small": self.count}


class Objectives(Counter):
    """Gives a reward per objective, as a list or an array; ends after three steps. ``declared`` by its reward space."""

    def __init__(self, objectives: int = 2, as_list: bool = False, infos: str = "", declared: bool = False) -> None:
        super().__init__(length=3)
        if declared:
            self.reward_space = spaces.Box(0, 9, (objectives,))
        self.objectives, self.as_list, self.infos = objectives, as_list, infos

    def act(self, action: int) -> None:
        if action == 900:
            os._exit(3)
        if action == 901:
            self.objectives += 1

    def step(self, action: Any) -> tuple[Any, ...]:
        observation, _, *ended, _ = super().step(action)
        reward = [self.count + number / 4 for number in range(self.objectives)]
        info = {"n": self.count} if self.infos == "numbers" else {"t": "text"} if self.infos == "text" else {}
        return observation, reward if self.as_list else np.array(reward, np.float32), *ended, info


class Goals(Objectives):
    """Takes two actions, neither of which does it harm."""

    action_space = spaces.Discrete(2)


class Ratings(Objectives):
    """Observes nothing of its process, and takes every action, so that two runs can be compared."""

    def act(self, action: int) -> None:
        pass

    def observation(self) -> np.ndarray:
        return np.array([self.count, self.objectives], np.float64)
