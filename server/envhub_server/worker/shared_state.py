"""State that all envs of a process share, and its changes."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np

from envhub_server.ipc.control import SHARED


class SharedState:
    """A snapshot of the state, compared on demand."""

    def __init__(self) -> None:
        self._before = _state()

    def changed(self) -> list[str]:
        """The names in ``SHARED`` whose state has changed."""
        now = _state()
        return [each for each in SHARED if now[each] != self._before[each]]


def _numbers() -> Any:
    """The state of NumPy's generator; of another one than its own, which a program may have set, its text."""
    numbers: Any = np.random.get_state(legacy=False)
    if numbers["bit_generator"] != "MT19937":
        return repr(numbers)
    return numbers["state"]["key"].tobytes(), numbers["state"]["pos"], numbers["has_gauss"], numbers["gauss"]


def _folder() -> str:
    return os.readlink("/proc/self/cwd")


def _state() -> dict[str, int]:
    values = (
        hash(_numbers()),
        hash(random.getstate()),
        hash(frozenset(os.environ.items())),
        hash(_folder()),
    )
    return dict(zip(SHARED, values))
