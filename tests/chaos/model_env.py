"""ModelEnv: an env that is a pure function of what it was told, so that each of its results is known beforehand.

Each observation says which env it is of, which of the env's lives (one per object made), how many resets and steps that
life has had, a rolling hash of all it was told, the seed of its last reset (-1 for none), and an attribute.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from chaos.chain_env import advance
from gymnasium.spaces import Box, Dict, Text

BOX, DICT, IMAGE = KINDS = ("box", "dict", "image")
GO, RAISE, CRASH, HANG, RESET_RAISES = COMMANDS = range(5)  # what an action commands, beside its number
_BYTES = (12, 12, 4)
_FRAME = (8, 8, 3)


class State(NamedTuple):
    """One life of an env, between two requests."""

    row: int
    life: int
    resets: int = 0
    steps: int = 0
    link: int = 0
    seed: int = -1
    attr: int = 0
    ended: bool = False
    armed: bool = False  # its next reset raises

    @property
    def head(self) -> tuple[int, ...]:
        """What an observation of it says."""
        return self[:7]

    def told(self, token: int) -> State:
        """After something that is no step."""
        return self._replace(link=advance(self.link, token))

    def reset(self, seed: int | None = None, option: int = 0) -> State:
        seed = -1 if seed is None else seed
        link = advance(self.link, option << 20)
        return self._replace(resets=self.resets + 1, steps=0, link=link, seed=seed, ended=False, armed=False)

    def step(self, command: int, number: int) -> tuple[State, float, bool, bool]:
        """After a step, with its reward and flags; even rows have episodes of one length, others of any."""
        link, steps = advance(self.link, number * 8 + command), self.steps + 1
        ended = steps >= 9 if self.row % 2 == 0 else link % 11 == 0
        after = self._replace(link=link, steps=steps, ended=ended, armed=self.armed or command == RESET_RAISES)
        return after, link % 4096 / 8, ended and link % 3 != 0, ended and link % 3 != 1

    def info(self) -> dict[str, Any]:
        """Numbers and texts, in some steps."""
        infos: tuple[dict[str, Any], ...] = (
            {},
            {"n": self.steps},
            {"x": self.link / 7, "ok": self.link % 2 == 0},
            {"text": f"{self.link:x} é"},
            {"deep": {"n": self.row, "text": "ab" * self.steps}},
            {"v": np.array([self.link % 99, self.steps], np.int32)},
            {"n": self.steps, "text": "", "b": b"\x00\xff"},
        )
        return infos[self.link % len(infos)]

    def frame(self) -> np.ndarray:
        return np.resize(np.array(self.head).view(np.uint8), _FRAME)


def word(link: int) -> str:
    """The part of no fixed size of an observation."""
    return f"{link:x}" * (link % 4)


def observation(kind: str, head: tuple[int, ...]) -> Any:
    """One env's observation that says this."""
    array = np.array(head, np.int64)
    if kind == IMAGE:
        return np.resize(array.view(np.uint8), _BYTES)
    return {"head": array, "word": word(head[4])} if kind == DICT else array


def heads(kind: str, batch: Any) -> list[tuple[int, ...]]:
    """What the observations of a batch say; (-1, what is torn) where one is not whole."""
    if kind == IMAGE:
        flat = batch.reshape(len(batch), -1)
        arrays = np.ascontiguousarray(flat[:, :56]).view(np.int64)
        whole = (np.tile(arrays.view(np.uint8), 11)[:, : flat.shape[1]] == flat).all(1)
    else:
        arrays = batch["head"] if kind == DICT else batch
        words = batch["word"] if kind == DICT else [word(link) for link in arrays[:, 4].tolist()]
        whole = [word(link) == each for link, each in zip(arrays[:, 4].tolist(), words, strict=True)]
    found = [tuple(each) for each in arrays.tolist()]
    return [head if intact else (-1, *head) for head, intact in zip(found, whole, strict=True)]


@functools.lru_cache
def space(kind: str) -> gym.Space[Any]:
    limits = np.iinfo(np.int64)
    box = Box(limits.min, limits.max, (7,), np.int64)
    return {BOX: box, DICT: Dict(head=box, word=Text(64, min_length=0)), IMAGE: Box(0, 255, _BYTES, np.uint8)}[kind]


class ModelEnv(gym.Env[Any, np.ndarray]):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}
    action_space = Box(0, 1 << 30, (2,), np.int64)

    def __init__(self, kind: str = BOX, row: int = 0, render_mode: str = "rgb_array") -> None:
        self.render_mode, self._kind, self.observation_space, self.attr = render_mode, kind, space(kind), 0
        self._state = State(row, int.from_bytes(os.urandom(7), "little"))

    @property
    def state(self) -> State:
        return self._state._replace(attr=self.attr)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self._state.armed:
            self._state = self._state._replace(armed=False)
            raise ArithmeticError(f"reset of {self._state.row}")
        self._state = self.state.reset(seed, (options or {}).get("option", 0))
        return self._observed()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        command, number = map(int, action)
        if command == RAISE:
            raise ArithmeticError(f"step of {self._state.row}")
        if command == CRASH:
            os._exit(3)
        if command == HANG:
            time.sleep(1000)
        self._state, reward, terminated, truncated = self.state.step(command, number)
        seen, info = self._observed()
        return seen, reward, terminated, truncated, info

    @property
    def head(self) -> tuple[int, ...]:
        return self.state.head

    def poke(self, token: int) -> tuple[int, ...]:
        """Tell it something by a call: -1 to raise, -2 to crash."""
        if token == -1:
            raise KeyError(f"call of {self._state.row}")
        if token == -2:
            os._exit(3)
        self._state = self.state.told(token)
        return self.state.head

    def mates(self) -> list[int]:
        """The rows of the envs of its process."""
        return [int(each) for each in os.environ["ENVHUB_ENV_INDICES"].split(",")]

    def render(self) -> np.ndarray:
        return self.state.frame()

    def _observed(self) -> tuple[Any, dict[str, Any]]:
        return observation(self._kind, self.state.head), self.state.info()
