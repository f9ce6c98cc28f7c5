"""Shares libraries among workers: a worker says which ones its envs import, and the zygote imports them for the others.

Python 3.8 and later.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import os
import sys
import traceback
from typing import Sequence

import numpy as np

from envhub_server.ipc.shared_libraries import VARIABLES, shared

PID_BITS = 22  # at most, on Linux
# Those that shared libraries make when they are imported, by their modules; ``seed`` takes a random one.
GENERATORS = (("torch", "default_generator"), ("sympy.core.random", "rng"))

_tried: set[str] = set()  # what this zygote has imported, or could not import


def share(libraries: Sequence[str]) -> None:
    """Import these libraries in the zygote, so that all workers that it forks from now on have them."""
    wanted = [name for name in shared(libraries) if name not in _tried]
    if not wanted:
        return
    _tried.update(wanted)
    path = sys.path[:]
    sys.path[:] = _places()
    try:
        for name in wanted:
            try:
                importlib.import_module(name)
            except BaseException:  # whatever it raises, the workers import it for themselves
                traceback.print_exc()  # into the zygote's log
    finally:
        sys.path[:] = path
    gc.collect()
    gc.freeze()


def reseed() -> None:
    """Seed the generators that the zygote has made: envs of two workers must not draw the same numbers.

    Python's ``random`` seeds itself after a fork.
    """
    # A seed of 128 bits takes NumPy 0.4 ms more, and 350 KB. The number of the process differs between living ones.
    np.random.seed((int.from_bytes(os.urandom(4), "little") << PID_BITS | os.getpid()) & 0xFFFFFFFF)
    for module, generator in GENERATORS:
        if module in sys.modules:
            getattr(sys.modules[module], generator).seed()


class LibraryUse:
    """Which shared libraries this process imports from now on, a worker that has just been forked."""

    def __init__(self) -> None:
        self._before = frozenset(shared(sys.modules))
        self._variables = _variables()
        self._places = _places()

    def imported(self) -> list[str]:
        """The libraries that the zygote can import for other workers of the same envs.

        None where it could make a difference: if a variable that such libraries read has changed since the fork, or
        if this process has more than one thread, for a zygote that has threads cannot fork. A library that the zygote
        would find elsewhere does not count.
        """
        found = [name for name in shared(sys.modules) if name not in self._before]
        if not found or _variables() != self._variables or len(os.listdir("/proc/self/task")) > 1:
            return []
        return [name for name in found if self._is_the_zygotes(name.partition(".")[0])]

    def _is_the_zygotes(self, package: str) -> bool:
        spec = importlib.machinery.PathFinder.find_spec(package, self._places)
        return spec is not None and spec.origin == getattr(sys.modules[package], "__file__", None)


def _places() -> list[str]:
    """Where libraries are looked for: not in the working directory, which a program's workers leave."""
    return [place for place in sys.path if place]


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
