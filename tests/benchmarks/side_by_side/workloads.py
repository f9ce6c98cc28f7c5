"""Envs besides Gymnasium's: images, simulators that compute or wait, and spaces and infos of every kind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

BUSY_S = 0.001
EPISODE_STEPS = 500
IMAGE = (84, 84, 4)

SPACES: dict[str, spaces.Space[Any]] = {
    "Text": spaces.Text(64),
    "Sequence": spaces.Sequence(spaces.Box(-1, 1, (4,))),
    "Graph": spaces.Graph(spaces.Box(-1, 1, (4,)), spaces.Box(-1, 1, (2,))),
    "Dict of 50": spaces.Dict({f"leaf {number}": spaces.Box(-1, 1, (3,)) for number in range(50)}),
}
INFOS: dict[str, dict[str, Any]] = {
    "text": {"at": 1.5, "said": "the left door is open, and the light is red"},
    "list": {"at": 1.5, "path": [0.5 * number for number in range(10)]},
    "list of dicts": {"seen": [{"name": f"box {number}", "at": [0.5, 1.5], "held": False} for number in range(5)]},
}


def compute(seconds: float) -> None:
    """Take so much CPU time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Synthetic(gymnasium.Env[Any, np.int64]):
    """Spends time, and hands out what it has made before: two observations in turn, an info and two frames."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}
    action_space = spaces.Discrete(4)
    gravity = 9.81

    def __init__(
        self,
        observed: str | Sequence[int] = (32,),
        info: str | int = 0,
        busy_s: float = 0.0,
        wait_s: float = 0.0,
        episode_steps: int = EPISODE_STEPS,
        frame: tuple[int, ...] = (84, 84),
        render_mode: str | None = None,
    ) -> None:
        """Observe bytes of a shape or one of ``SPACES``, with an info of so many KiB of numbers or one of ``INFOS``."""
        if isinstance(observed, str):
            self.observation_space = SPACES[observed]
        else:
            self.observation_space = spaces.Box(0, 255, tuple(observed), np.dtype(np.uint8))
        self.observation_space.seed(1)
        self._observations = [self.observation_space.sample() for _ in range(2)]
        numbers = {"at": 1.5, "numbers": np.arange(128.0 * info)} if not isinstance(info, str) and info else {}
        self._info: dict[str, Any] = INFOS[info] if isinstance(info, str) else numbers
        self._busy_s, self._wait_s, self._episode_steps = busy_s, wait_s, episode_steps
        self.render_mode = render_mode
        self._frames = [np.full((*frame, 3), value, np.uint8) for value in (0, 255)] if render_mode else []
        self._grid = np.arange(4096.0)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observations[0], {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        if self._busy_s:
            compute(self._busy_s)
        if self._wait_s:
            time.sleep(self._wait_s)
        ended = self._steps >= self._episode_steps
        return self._observations[self._steps % 2], 1.0, False, ended, dict(self._info)

    def render(self) -> Any:
        return self._frames[self._steps % 2]

    def speed(self) -> float:
        return 0.5 * self._steps

    def grid(self) -> np.ndarray:
        return self._grid


images = partial(Synthetic, IMAGE)  # as of a stack of Atari's frames, at no cost
busy = partial(Synthetic, busy_s=BUSY_S)
# It takes no CPU time but waits, as for a simulator behind a socket, on a GPU, or for a robot.
wait = partial(Synthetic, wait_s=0.01)


class Frames(Synthetic):
    """Frames of 64 x 64 x 3 bytes, as of Crafter: of tiles with a texture, or of one colour with noise; by seed."""

    def __init__(self, tiles: bool) -> None:
        super().__init__((64, 64, 3))
        self._tiles = tiles

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        frame = self.np_random.integers(50, 200, 3) + self.np_random.integers(-3, 4, (64, 64, 3))
        if self._tiles:
            kinds = np.random.default_rng(1).integers(0, 256, (6, 8, 8, 3))
            frame = kinds[self.np_random.integers(0, 6, (8, 8))].transpose(0, 2, 1, 3, 4).reshape(64, 64, 3)
        self._observations = [frame.astype(np.uint8)] * 8
        return self._observations[0], {}


tiles, noisy = partial(Frames, tiles=True), partial(Frames, tiles=False)


def atari() -> gymnasium.Env[Any, Any]:
    """Pong, preprocessed as in most papers: 84 x 84 grey pixels, every fourth frame, the last four of them."""
    env = gymnasium.make("ale_py:ALE/Pong-v5", frameskip=1)
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)


OWN = ("images", "busy", "wait", "tiles", "noisy", "atari", "Synthetic")


def entry(name: str) -> str:
    """The argument by which ``envhub serve`` offers an env of this module, or a Gymnasium id."""
    return f"{name}={__name__}:{name}" if name in OWN else name
