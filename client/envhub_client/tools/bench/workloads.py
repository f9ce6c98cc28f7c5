"""What ``envhub bench`` steps besides Gymnasium's envs: images, simulators that compute, and simulators that wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

BUSY_S, BUSY_100US_S = 0.001, 0.0001
UNEQUAL_S = (0.0001, 0.002)
WAIT_S, WAIT_2MS_S = 0.01, 0.002
WAIT_RANDOM_S = (0.0001, 0.02)
EPISODE_STEPS = 500

Factory = Callable[[], gymnasium.Env[Any, Any]]


class Synthetic(gymnasium.Env[np.ndarray, np.int64]):
    """Does nothing but take CPU time, and observes the same array again and again."""

    action_space = spaces.Discrete(4)

    def __init__(self, space: spaces.Box, least_s: float = 0.0, most_s: float = 0.0) -> None:
        """Take between so many seconds for each step, at random."""
        self.observation_space = space
        self._least_s, self._most_s = least_s, most_s
        self._observation = space.sample()
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """As in Gymnasium."""
        super().reset(seed=seed)
        self._steps = 0
        return self._observation, {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take the time."""
        self._steps += 1
        if self._most_s:
            end_s = time.thread_time() + self.np_random.uniform(self._least_s, self._most_s)
            while time.thread_time() < end_s:
                pass
        return self._observation, 1.0, False, self._steps >= EPISODE_STEPS, {}


def images() -> gymnasium.Env[Any, Any]:
    """84 x 84 x 4 bytes, as of a stack of Atari's frames, at no cost."""
    return Synthetic(spaces.Box(0, 255, (84, 84, 4), np.uint8))


def busy() -> gymnasium.Env[Any, Any]:
    """1 ms of CPU time a step."""
    return Synthetic(spaces.Box(-1, 1, (8,), np.float32), BUSY_S, BUSY_S)


def busy_100us() -> gymnasium.Env[Any, Any]:
    """0.1 ms of CPU time a step."""
    return Synthetic(spaces.Box(-1, 1, (8,), np.float32), BUSY_100US_S, BUSY_100US_S)


class Waiting(Synthetic):
    """Takes no CPU time but waits, as for a simulator behind a socket, on a GPU, or for a robot."""

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Wait."""
        time.sleep(self.np_random.uniform(self._least_s, self._most_s))
        self._steps += 1
        return self._observation, 1.0, False, self._steps >= EPISODE_STEPS, {}


def wait() -> gymnasium.Env[Any, Any]:
    """Waits 10 ms a step."""
    return Waiting(spaces.Box(-1, 1, (8,), np.float32), WAIT_S, WAIT_S)


def wait_2ms() -> gymnasium.Env[Any, Any]:
    """Waits 2 ms a step."""
    return Waiting(spaces.Box(-1, 1, (8,), np.float32), WAIT_2MS_S, WAIT_2MS_S)


def wait_random() -> gymnasium.Env[Any, Any]:
    """Waits between 0.1 and 20 ms, other at each step."""
    return Waiting(spaces.Box(-1, 1, (8,), np.float32), *WAIT_RANDOM_S)


def unequal() -> gymnasium.Env[Any, Any]:
    """Between 0.1 and 2 ms of CPU time, other at each step."""
    return Synthetic(spaces.Box(-1, 1, (8,), np.float32), *UNEQUAL_S)


def atari() -> gymnasium.Env[Any, Any]:
    """Pong, preprocessed as in most papers: 84 x 84 grey pixels, every fourth frame, the last four of them."""
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.wrappers.AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1))
    return gymnasium.wrappers.FrameStackObservation(env, 4)


OWN: dict[str, Factory] = {
    made.__name__: made for made in (images, busy, busy_100us, unequal, wait, wait_2ms, wait_random, atari)
}


def factory(name: str) -> Factory:
    """What makes the env of this name: one of ``OWN``, or a Gymnasium id."""
    return OWN.get(name) or partial(_by_id, name)


def _by_id(name: str) -> gymnasium.Env[Any, Any]:
    if name.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
    return gymnasium.make(name)


def offered(name: str) -> str:
    """What ``envhub serve`` is told to offer it."""
    return f"{name}={__name__}:{name}" if name in OWN else name
