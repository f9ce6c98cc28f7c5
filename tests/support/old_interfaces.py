"""Envs as packages of other years wrote them, with no base class that an installed gym would give them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class BoxFields(NamedTuple):
    """In place of a space, as in Crafter where gym is not installed."""

    low: float
    high: float
    shape: tuple[int, ...]
    dtype: Any


class DiscreteFields(NamedTuple):
    n: int


class Plain:
    """The interface of gym 0.21: ``seed``, a reset without an info, steps of four values; ends after five steps."""

    metadata = None
    extra = "of the env"

    def __init__(self, start: float = 0.0) -> None:
        self.start = start
        self._random = np.random.RandomState(0)
        self._count = 0

    @property
    def observation_space(self) -> BoxFields:
        return BoxFields(-100, 100, (3,), np.float32)

    @property
    def action_space(self) -> DiscreteFields:
        return DiscreteFields(4)

    def seed(self, seed: int | None = None) -> list[int | None]:
        self._random = np.random.RandomState(seed)
        return [seed]

    def _observation(self) -> np.ndarray:
        return (self.start + self._random.uniform(size=3)).astype(np.float32)

    def reset(self) -> np.ndarray:
        self._count = 0
        return self._observation()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        self._count += 1
        late = {"TimeLimit.truncated": True} if action == 3 else {}
        return self._observation(), float(action), self._count == 5, {"count": self._count, **late}


class Newer(Plain):
    """The interface of gym 0.26, with a reset that takes no options."""

    def reset(self, seed: int | None = None) -> Any:
        if seed is not None:
            self.seed(seed)
        return super().reset(), {}

    def step(self, action: int) -> Any:
        observation, reward, ended, info = super().step(action)
        late = bool(info.pop("TimeLimit.truncated", False))
        return observation, reward, ended and not late, ended and late, info
