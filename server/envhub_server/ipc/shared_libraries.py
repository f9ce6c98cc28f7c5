"""The libraries that a zygote imports for all workers of envs that import them. Python 3.8 and later.

A worker that imports PyTorch takes 2 s of CPU time and 150 MB for it. Imported in the zygote, it takes that once.

Only what is listed here is shared. Importing one of these leaves nothing behind that two envs must not share: no
thread, process, open file or signal handler, no changed variable, and no random generator that a worker does not seed.
What envs and their own modules do when they are imported is not known, so each worker imports these for itself.
"""

from __future__ import annotations

from typing import Container

LIBRARIES = (
    *("mujoco", "networkx", "pandas", "sympy", "torch"),
    *("scipy", "scipy.integrate", "scipy.interpolate", "scipy.linalg", "scipy.ndimage", "scipy.optimize"),
    *("scipy.signal", "scipy.sparse", "scipy.spatial", "scipy.spatial.transform", "scipy.special", "scipy.stats"),
)
# MuJoCo imports one of these where ``MUJOCO_GL`` says so, and EGL's opens a device, which no fork may use.
_OPENS_A_DEVICE = ("mujoco.egl", "mujoco.osmesa")


def shared(names: Container[str]) -> list[str]:
    """Those of the names that are shared libraries, each once, in the order in which they are imported."""
    # Not by a set of the names: of all modules, that would write to the pages of all their names in each worker.
    draws = any(name in names for name in _OPENS_A_DEVICE)
    return [name for name in LIBRARIES if name in names and not (draws and name == "mujoco")]
