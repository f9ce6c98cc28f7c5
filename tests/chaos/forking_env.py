"""A chain whose every call may fork a child, which ends as it should, or comes back and takes itself for the worker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from chaos.chain_env import ChainEnv
from support.unruly import ACTS, FORKS


class ForkingEnv(ChainEnv):
    """Forks in one of ``one_in`` calls.

    Attributes:
        forks: how many times it did, by what the child did.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self, one_in: int, length: int = 50) -> None:
        self._chance = random.Random()
        self._one_in = one_in
        self.forks: dict[str, int] = {}
        self._fork("__init__")
        super().__init__(length=length)

    def _fork(self, call: str) -> None:
        if not self._chance.randrange(self._one_in):
            act = self._chance.choice(FORKS)
            name = f"{call}, {act}"
            self.forks[name] = self.forks.get(name, 0) + 1
            ACTS[act]()

    def reset(self, **arguments: Any) -> Any:
        self._fork("reset")
        return super().reset(**arguments)

    def step(self, action: np.ndarray) -> Any:
        self._fork("step")
        return super().step(action)

    def render(self) -> np.ndarray:
        self._fork("render")
        return np.full((2, 2, 3), self._counter % 256, np.uint8)

    def echo(self, value: Any) -> Any:
        self._fork("echo")
        return value

    def close(self) -> None:
        self._fork("close")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "note":
            self._fork("set_attr")
