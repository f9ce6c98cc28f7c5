"""ChainEnv: an env of whose every observation a client can say whether it is the right one.

An observation is int64::

    row | incarnation | counter | link | counter | counter | ... | counter

``row`` is whose actions the env gets: -1 before the first, -2 once two rows have sent some. ``incarnation`` is another
number for every env that is made. ``counter`` says how many resets and steps the incarnation has seen, and ``link`` is
a rolling hash of all of them. So one look at an observation shows that every action was carried out once, in order, by
the env it was meant for, and that nobody read the row while it was written, if it is long enough for that.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

HEAD = 4  # elements before the tail
UNOWNED, STRAYED = -1, -2
ROWS_MAX = 1 << 16
RESET = 0

_MODULUS = (1 << 61) - 1
_FACTOR = 0x9E3779B97F4A7C15 % _MODULUS
_REWARDS = 1 << 20


def token(row: int, number: int) -> int:
    """What the action ``[row, number]`` adds to a link; never that of a reset."""
    return number * ROWS_MAX + row + 1


def advance(link: int, token: int) -> int:
    """The link after one more step or reset."""
    return (link * _FACTOR + token + 1) % _MODULUS


def reward_of(link: int) -> float:
    """The reward of the step that made this link."""
    return float(link % _REWARDS)


@functools.lru_cache
def _space(elements: int) -> Box:
    """One for all envs of a process: its bounds are as large as an observation, each."""
    limits = np.iinfo(np.int64)
    return Box(limits.min, limits.max, (HEAD + elements,), np.int64)


class ChainEnv(gym.Env[np.ndarray, np.ndarray]):
    """Episodes of ``length`` steps, which are terminated and truncated in turn; ``elements`` numbers in the tail."""

    action_space = Box(0, 1 << 46, (2,), np.int64)

    def __init__(self, elements: int = 60, length: int = 50) -> None:
        self.observation_space = _space(elements)
        self._length = length
        self._row = UNOWNED
        self._incarnation = int.from_bytes(os.urandom(7), "little")
        self._counter = self._link = 0
        self._resets = self._steps = 0
        self._seen = np.empty(HEAD + elements, np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._resets += 1
        self._steps = 0
        return self._observe(RESET), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        row, number = map(int, action)
        if self._row != row:
            self._row = row if self._row == UNOWNED else STRAYED
        self._steps += 1
        seen = self._observe(token(row, number))
        ended, odd = self._steps >= self._length, self._resets % 2 == 1
        return seen, reward_of(self._link), ended and odd, ended and not odd, {}

    def _observe(self, token: int) -> np.ndarray:
        self._counter += 1
        self._link = advance(self._link, token)
        self._seen[:] = self._counter
        self._seen[:HEAD] = self._row, self._incarnation, self._counter, self._link
        return self._seen
