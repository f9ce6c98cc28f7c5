"""Envs for the tests of recording."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Parts(gymnasium.Env[Any, Any]):
    """Observations of images and numbers that differ in every step; episodes of 3 to 8 steps, by the seed."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    observation_space = spaces.Dict(
        {"image": spaces.Box(0, 255, (16, 20, 3), np.uint8), "at": spaces.Discrete(1000), "x": spaces.Box(-9, 9, ())}
    )
    action_space = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(4)])

    def __init__(self, raises_at: int = -1, length: int = 0, render_mode: str | None = None) -> None:
        self.raises_at, self.length, self.render_mode = raises_at, length, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.ends = 0, self.length or int(self.np_random.integers(3, 9))
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        if self.at == self.raises_at:
            raise ValueError("it broke")
        ended = self.at == self.ends
        odd = bool(self.ends % 2)
        return self._shown(), float(action[1]) + float(action[0][0]), ended and odd, ended and not odd, {}

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.full((31, 40, 3), 20 * self.at, np.uint8)

    def _shown(self) -> dict[str, Any]:
        image = self.np_random.integers(0, 256, (16, 20, 3)).astype(np.uint8)
        return {"image": image, "at": np.int64(self.at), "x": np.float32(self.np_random.uniform(-9, 9))}


class Talker(gymnasium.Env[Any, Any]):
    """Says the texts that it is told, of up to six characters; episodes of four steps."""

    observation_space = spaces.Dict({"said": spaces.Text(6, charset="abcä€"), "at": spaces.Discrete(9)})
    action_space = spaces.Text(6, charset="abcä€")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return {"said": "a", "at": 0}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return {"said": str(action), "at": self.at}, float(len(action)), self.at == 4, False, {}


parts = Parts
