"""Envs that each do one thing that ``serve --check`` and ``validate`` find."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from typing import Any

import numpy as np
import sims


class Hangs(sims.Counter):
    """Does not return from a reset."""

    def reset(self, **arguments: Any) -> tuple[np.ndarray, dict[str, Any]]:
        time.sleep(600)
        return super().reset(**arguments)


class Crashes(sims.Counter):
    """Ends its process in a step."""

    def act(self, action: int) -> None:
        os.abort()


class Divides(sims.Counter):
    """Raises in a step."""

    def act(self, action: int) -> None:
        _ = 1 / 0


class Random(sims.Counter):
    """Draws from the generator of its process."""

    def step(self, action: int) -> Any:
        _, *others = super().step(action)
        return np.random.random(2), *others


class Waits(sims.Counter):
    """Waits in each step."""

    def act(self, action: int) -> None:
        time.sleep(0.005)


class Threads(sims.Counter):
    """Leaves a thread and a process."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=time.sleep, args=(600,), name="poller", daemon=True).start()
        self.process = subprocess.Popen(["sleep", "600"])


class Lone(sims.Counter):
    """Can be made once in a process."""

    made = False

    def __init__(self) -> None:
        super().__init__()
        if Lone.made:
            raise RuntimeError("only one per process")
        Lone.made = True


def raises() -> Any:
    raise ValueError("no licence")


def wants(level: int) -> Any:
    return sims.Counter()
