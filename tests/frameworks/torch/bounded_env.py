"""An env whose spaces have bounds of its own."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Bounded(gymnasium.Env[Any, Any]):
    """Its spaces have bounds of its own, and the same shapes as those of others."""

    def __init__(self, row: int) -> None:
        self.observation_space, self.action_space = Box(-1.0 - row, 1.0 + row, (2,)), Discrete(2 + row)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.full(2, action, np.float32), 1.0, False, False, {}
