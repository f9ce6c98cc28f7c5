"""Envs besides Gymnasium's: images, simulators that compute, and simulators that wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

BUSY_S = 0.001
EPISODE_STEPS = 500


def compute(seconds: float) -> None:
    """Take so much CPU time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Synthetic(gymnasium.Env[np.ndarray, np.int64]):
    """Does nothing but spend time, and observes the same array again and again."""

    action_space = spaces.Discrete(4)

    def __init__(self, seconds: float = 0.0, spend: Callable[[float], None] = compute, image: bool = False) -> None:
        """Spend these seconds on each step; observe 84 x 84 x 4 bytes, or 8 numbers."""
        self.observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8) if image else spaces.Box(-1, 1, (8,))
        self._seconds, self._spend = seconds, spend
        self._observation = self.observation_space.sample()
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation, {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._spend(self._seconds)
        return self._observation, 1.0, False, self._steps >= EPISODE_STEPS, {}


images = partial(Synthetic, image=True)  # as of a stack of Atari's frames, at no cost
busy = partial(Synthetic, BUSY_S)
# It takes no CPU time but waits, as for a simulator behind a socket, on a GPU, or for a robot.
wait = partial(Synthetic, 0.01, time.sleep)


def atari() -> gymnasium.Env[Any, Any]:
    """Pong, preprocessed as in most papers: 84 x 84 grey pixels, every fourth frame, the last four of them."""
    env = gymnasium.make("ale_py:ALE/Pong-v5", frameskip=1)
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)


OWN = ("images", "busy", "wait", "atari")


def entry(name: str) -> str:
    """The argument by which ``envhub serve`` offers an env of this module, or a Gymnasium id."""
    return f"{name}={__name__}:{name}" if name in OWN else name
