"""A seeded simulator that fails by chance, in a way that its maker chooses."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

CAUSES = ["segfault", "exit", "hang", "exception", "nan", "memory"]


class Brittle(gym.Env[np.ndarray, int]):
    """A walk of random steps; fails in a step with the chance ``rate``, and with ``options={"fail": True}`` in a reset.

    Args:
        cause: how it fails.
        rate: how often.
        length: of an episode.
        width: of an observation.
        unlike: draw random numbers that no seed decides.
    """

    action_space = spaces.Discrete(5)

    def __init__(self, cause: str, rate: float = 0.1, length: int = 7, width: int = 3, unlike: bool = False) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (width,), np.float64)
        self.cause, self.rate, self.length, self.unlike = cause, rate, length, unlike
        self.place, self.steps = np.zeros(width), 0
        self.held: list[bytes] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.normal(size=self.place.shape), 0
        if options and options.get("fail"):
            self.fail()
        return self.place.copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.place = self.place + action + self.np_random.normal(size=self.place.shape)
        if self.unlike:
            self.place[0] += os.getpid()
        if self.np_random.random() < self.rate:
            self.fail()
        return self.place.copy(), float(action), self.steps >= self.length, False, {}

    def fail(self) -> None:
        if self.cause == "segfault":
            ctypes.string_at(0)
        elif self.cause == "exit":
            os._exit(3)
        elif self.cause == "hang":
            time.sleep(3600)
        elif self.cause == "exception":
            raise ValueError(f"brittle at {self.place[-1]:.6f}")
        elif self.cause == "nan":
            self.place[:] = np.nan
        elif self.cause == "memory":
            while True:
                self.held.append(b"x" * (1 << 24))
        elif self.cause == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


TUNED: list[int] = []


class Tuned(Brittle):
    """Is made only where its worker was set up."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause, rate=1.0)
        self.tuned = TUNED[0]


def tune() -> None:
    """Set a worker up."""
    TUNED.append(1)
