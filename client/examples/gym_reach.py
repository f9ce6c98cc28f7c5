"""A package of environments as LeRobot's users write them: importing it registers its tasks.

Observations have ``pixels`` and ``agent_pos``, and infos say ``is_success``.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

SIZE = 32


class Reach(gymnasium.Env[Any, Any]):
    """Move to the goal, which only the image shows."""

    observation_space = gymnasium.spaces.Dict(
        {
            "pixels": gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8),
            "agent_pos": gymnasium.spaces.Box(0, 1, (2,), np.float32),
        }
    )
    action_space = gymnasium.spaces.Box(-0.1, 0.1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.goal = self.np_random.random((2, 2))
        return self._seen()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at = np.clip(self.at + np.clip(action, -0.1, 0.1), 0, 1)
        observation, info = self._seen()
        return observation, float(info["is_success"]) - 0.01, info["is_success"], False, info

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        pixels = np.zeros((SIZE, SIZE, 3), np.uint8)
        row, column = (self.goal * (SIZE - 3)).astype(int)
        pixels[row : row + 3, column : column + 3] = 255, 0, 0
        info = {
            "is_success": bool(np.abs(self.goal - self.at).max() < 0.07),
            "expert": np.clip(self.goal - self.at, -0.1, 0.1).astype(np.float32),
        }
        return {"pixels": pixels, "agent_pos": self.at.astype(np.float32)}, info


gymnasium.register("gym_reach/Reach-v0", entry_point="gym_reach:Reach", max_episode_steps=50)
