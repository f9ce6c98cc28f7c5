"""Shared libraries of workers: a worker reports its envs' imports, and a zygote imports them for later workers.

Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import random
import sys
from typing import Mapping, Sequence

import numpy as np

from envhub_server.ipc.shared_libraries import shared

# The random generators that shared libraries make when they are imported, by their modules.
GENERATORS = (("torch", "default_generator"), ("sympy.core.random", "rng"), ("sympy.core.random", "_assumptions_rng"))
# The dynamic loader reads it when a process starts, and only then; OpenCV changes it when it is imported.
READ_BY_THE_LOADER = "LD_LIBRARY_PATH"
# Where the zygote looks for libraries: not in the folder of envs' own modules, which is added later.
_PLACES = [place for place in sys.path if place]


def load(library: str) -> None:
    """Import a library in the zygote; if that fails, workers import it themselves."""
    path = sys.path[:]
    sys.path[:] = _PLACES
    try:
        importlib.import_module(library)
    except ModuleNotFoundError:
        pass  # it was removed since
    except BaseException as error:  # a library may raise anything
        print(f"envhub: {library} cannot be imported for all workers at once: {error!r}", file=sys.stderr, flush=True)
    finally:
        sys.path[:] = path


def reseed(numbers: Sequence[int] = (), *place: int) -> None:
    """Seed the process's generators, since envs must not draw the same numbers.

    Args:
        numbers: for NumPy's generator and for Python's; by default the system's.
        place: numbers of the env and its incarnation, which the seeds depend on, too.
    """
    first, second = (
        int(np.random.SeedSequence(number, spawn_key=place).generate_state(1)[0])
        for number in numbers or [int.from_bytes(os.urandom(8), "little")] * 2
    )
    np.random.seed(first)  # an array of more bits takes 0.4 ms more, and 350 KB
    random.seed(second)
    for module, name in GENERATORS:
        if module in sys.modules:
            with contextlib.suppress(AttributeError):  # in another version
                generator = getattr(sys.modules[module], name)
                getattr(generator, "manual_seed", generator.seed)(first)


def shareable(variables: Mapping[str, str]) -> list[str] | None:
    """The libraries in this process that a zygote can import for other workers of the same envs.

    None if workers of these envs must share none, because that could make a difference: the envs have changed one of
    these variables, with which they began, and which a library may read; or this process has threads, and a zygote
    that has threads cannot fork; or a library would be found elsewhere, by a zygote or by this process. Where there are
    no zygotes, there is nothing to share.
    """
    libraries = shared(sys.modules) if sys.platform == "linux" else []
    if not libraries:
        return []
    threads = len(os.listdir("/proc/self/task"))
    same = all(_is_found_in(path, name.partition(".")[0]) for path in (_PLACES, sys.path) for name in libraries)
    return libraries if same and threads == 1 and _read(os.environ) == _read(variables) else None


def _is_found_in(path: list[str], package: str) -> bool:
    spec = importlib.machinery.PathFinder.find_spec(package, path)
    return spec is not None and spec.origin == getattr(sys.modules[package], "__file__", None)


def _read(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a library may read, without EnvHub's own, which differ between workers."""
    items = variables.items()
    return {name: value for name, value in items if name != READ_BY_THE_LOADER and not name.startswith("ENVHUB_")}
