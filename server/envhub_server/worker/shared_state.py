"""What all envs of a process have in common, and which of it they change."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np

from envhub_server.ipc.control import SHARED


class SharedState:
    """How that was when this object was made. No time is spent on it until somebody looks."""

    def __init__(self) -> None:
        self._before = _state()

    def changed(self) -> list[str]:
        """Those of ``SHARED`` that differ from how they were."""
        now = _state()
        return [each for each in SHARED if now[each] != self._before[each]]


def _state() -> dict[str, int]:
    numbers: Any = np.random.get_state()
    found = (
        hash((numbers[1].tobytes(), *numbers[2:])),
        hash(random.getstate()),
        hash(frozenset(os.environ.items())),
        hash(os.readlink("/proc/self/cwd")),  # also of a folder that somebody has removed
    )
    return dict(zip(SHARED, found))
