"""Envs for the tests of recording."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import sims
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from envhub.recording.recorder import EpisodeRecorder


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

    def meddle(self) -> None:
        """Send what is no message by the line of the worker's recorder."""
        for each in gc.get_objects():
            if type(each) is EpisodeRecorder:
                each.tape.line.send(b"\xc1")

    def pid(self) -> int:
        return os.getpid()

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.full((31, 40, 3), 20 * self.at, np.uint8)

    def _shown(self) -> dict[str, Any]:
        image = self.np_random.integers(0, 256, (16, 20, 3)).astype(np.uint8)
        return {"image": image, "at": np.int64(self.at), "x": np.float32(self.np_random.uniform(-9, 9))}


class Unreadable(Exception):
    """An exception that cannot be shown by ``repr``."""

    def __repr__(self) -> str:
        raise RuntimeError("no form")


class Mute(Parts):
    """Raises what cannot be shown in its second step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.at == 1:
            raise Unreadable("it broke")
        return super().step(action)


class Dark(sims.Counter):
    """Says that it renders, and shows this, or nothing."""

    def __init__(self, shown: Any = None) -> None:
        super().__init__(render_mode="rgb_array")
        self._shown = shown

    def render(self) -> Any:
        if self._shown is None:
            raise RuntimeError("no light")
        return self._shown


class Stuck(Parts):
    """Hangs when it renders after ``hangs_at`` steps, once: not where ``marker`` exists, which it makes then."""

    def __init__(self, hangs_at: int, marker: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._hangs_at, self._marker = hangs_at, Path(marker)

    def render(self) -> np.ndarray:  # type: ignore[override]
        if self.at == self._hangs_at and not self._marker.exists():
            self._marker.touch()
            time.sleep(10**6)
        return super().render()


def parts(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    return Parts(**kwargs)


class Counted(Parts):
    """Counts how often it is rendered."""

    renders = 0

    def render(self) -> np.ndarray:  # type: ignore[override]
        self.renders += 1
        return super().render()


def filmed(num_envs: int, length: int) -> VectorEnv[Any, Any, Any]:
    """A vector env whose envs show frames."""
    return SyncVectorEnv([lambda: Counted(render_mode="rgb_array", length=length)] * num_envs)


def poles(num_envs: int, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> VectorEnv[Any, Any, Any]:
    """A vector env of CartPoles in any autoreset mode."""
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs, autoreset_mode=autoreset_mode)
