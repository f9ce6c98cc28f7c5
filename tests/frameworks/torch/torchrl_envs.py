"""Envs of the tests with TorchRL, which a hub serves by factory."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text

LENGTH = 5


class Kinds(gymnasium.Env[Any, Any]):
    """Observations in dicts, an image, and infos; episodes are truncated after five steps."""

    observation_space = Dict(
        {
            "position": Box(-9, 9, (2,), np.float32),
            "image": Box(0, 255, (6, 5, 3), np.uint8),
            "inner": Dict({"count": Discrete(9)}),
        }
    )
    action_space = Box(-1, 1, (2,), np.float32)

    def __init__(self) -> None:
        self.steps = 0

    def _observed(self) -> dict[str, Any]:
        return {
            "position": self.np_random.uniform(-1, 1, 2).astype(np.float32),
            "image": self.np_random.integers(0, 256, (6, 5, 3), np.uint8),
            "inner": {"count": np.int64(self.steps)},
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observed(), {"taken": np.float32(0)}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return (
            self._observed(),
            float(action.sum()),
            self.steps == LENGTH,
            self.steps % 5 == 0,
            {"taken": np.float32(self.steps)},
        )


class Speaks(gymnasium.Env[Any, Any]):
    """Says in which step of which episode it is; an episode has as many steps as its number and one."""

    observation_space = Dict({"said": Text(9), "place": Box(-1, 99, (1,), np.float32)})
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.episode, self.steps = 0, 0

    def _observed(self) -> dict[str, Any]:
        return {"said": f"{self.episode}x{self.steps}", "place": np.array([self.steps], np.float32)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observed(), 1.0, self.steps > self.episode, False, {}


class Counts(gymnasium.Env[Any, Any]):
    """Shows the number of its episode, which is its length in steps but for the first, and of the step in it."""

    observation_space = Box(-1, np.inf, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.episode, self.steps = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if action == 1 and self.steps == 1 and self.episode == 3:
            raise ArithmeticError("the third episode begins with a 1")
        observation = np.array([self.episode, self.steps], np.float32)
        return observation, 1.0, self.steps >= max(2, self.episode), False, {}


class Dies(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends its process in the fifth step of every third episode."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.episode = self.taken = 0

    def reset(self, **arguments: Any) -> Any:
        self.episode, self.taken = self.episode + 1, 0
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self.taken += 1
        if self.taken == 5 and self.episode % 3 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
