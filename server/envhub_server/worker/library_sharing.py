"""Shares libraries among workers: a worker says which ones its envs import, and a zygote imports them for others.

Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import sys

import numpy as np

from envhub_server.ipc.shared_libraries import shared

PID_BITS = 22  # at most, on Linux
# The random generators that shared libraries make when they are imported, by their modules.
GENERATORS = (("torch", "default_generator"), ("sympy.core.random", "rng"), ("sympy.core.random", "_assumptions_rng"))
# The dynamic loader reads it when a process starts, and only then; OpenCV changes it when it is imported.
READ_BY_THE_LOADER = "LD_LIBRARY_PATH"
# Where the zygote looks for libraries: not in its working directory, which its workers may leave.
_PLACES = [place for place in sys.path if place]


def load(library: str) -> None:
    """Import a library in the zygote; where that fails, workers import it for themselves."""
    path = sys.path[:]
    sys.path[:] = _PLACES
    try:
        importlib.import_module(library)
    except ModuleNotFoundError:
        pass  # it was removed since
    except BaseException as error:  # whatever it raises
        print(f"envhub: {library} cannot be imported for all workers at once: {error!r}", file=sys.stderr, flush=True)
    finally:
        sys.path[:] = path


def reseed() -> None:
    """Seed the generators that the zygote has made: envs of two workers must not draw the same numbers.

    Python's ``random`` seeds itself after a fork.
    """
    # A seed of 128 bits takes NumPy 0.4 ms more, and 350 KB. The number of the process differs between living ones.
    np.random.seed((int.from_bytes(os.urandom(4), "little") << PID_BITS | os.getpid()) & 0xFFFFFFFF)
    for module, generator in GENERATORS:
        if module in sys.modules:
            with contextlib.suppress(AttributeError):  # in another version
                getattr(sys.modules[module], generator).seed()


class LibraryUse:
    """Which shared libraries this worker has from now on, when it has adopted the environment of its envs."""

    def __init__(self) -> None:
        self._environ = _environ()

    def shareable(self) -> list[str]:
        """The libraries that a zygote can import for other workers of the same envs.

        None where it could make a difference: if the envs have changed a variable, which a library may read, or if
        this process has more than one thread, for a zygote that has threads cannot fork. Those do not count that a
        zygote would find elsewhere.
        """
        found = shared(sys.modules)
        if not found or _environ() != self._environ or len(os.listdir("/proc/self/task")) > 1:
            return []
        return [name for name in found if _is_the_zygotes(name.partition(".")[0])]


def _is_the_zygotes(package: str) -> bool:
    spec = importlib.machinery.PathFinder.find_spec(package, _PLACES)
    return spec is not None and spec.origin == getattr(sys.modules[package], "__file__", None)


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != READ_BY_THE_LOADER}
