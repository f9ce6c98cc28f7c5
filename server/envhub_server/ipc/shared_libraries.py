"""The libraries that a zygote imports for all workers of envs that have imported them before. Python 3.8 and later.

A worker that imports PyTorch takes 2 s of CPU time and 150 MB for it. Imported in the zygote, it takes that once.

Only what is listed here is shared. Importing one of these leaves nothing that two envs must not share: no thread, open
file, signal handler or registered env, and no random generator that a worker does not seed. It reads no environment
variable whose name begins otherwise than those of ``VARIABLES``, and those that a zygote starts with. Other modules,
the envs' own among them, are imported by each worker for itself: what they do then is not known. Libraries are not
listed that modules often set a variable for before they import them (``MUJOCO_GL``, ``MPLBACKEND``, ``NUMBA_...``): a
zygote that has imported one for an env would have it for envs that want another value, too.
"""

from __future__ import annotations

from typing import Container

LIBRARIES = (
    *("networkx", "pandas", "sklearn", "sympy", "tensordict", "torch", "torchvision"),
    *("scipy", "scipy.integrate", "scipy.interpolate", "scipy.linalg", "scipy.ndimage", "scipy.optimize"),
    *("scipy.signal", "scipy.sparse", "scipy.spatial", "scipy.spatial.transform", "scipy.special", "scipy.stats"),
)
VARIABLES = (
    *("ATEN_", "CUDA_", "HIP_", "KINETO_", "PYTORCH_", "ROCR_", "TORCH_"),
    *("JOBLIB_", "MPMATH_", "NETWORKX_", "PANDAS_", "SCIPY_", "SKLEARN_", "SYMPY_"),
)


def shared(names: Container[str]) -> list[str]:
    """Those of the names that are shared libraries, each once, in the order in which they are imported."""
    # Not by a set of the names: of all modules, that would write to the pages of all their names in each worker.
    return [name for name in LIBRARIES if name in names]
