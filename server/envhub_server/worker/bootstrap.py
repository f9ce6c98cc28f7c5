"""The first lines of a zygote: ``python bootstrap.py CONTROL_FD HUB_PID WORKERS NAME=FILE …``.

``WORKERS`` is the number of running workers that the zygote guards. Each file is that of a package or module that the
workers import. Nothing else of the hub's installation comes into the envs' ``sys.path``, because an interpreter of
another version must not find the hub's NumPy.
"""

import ctypes
import importlib.util
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

prctl = ctypes.CDLL(None).prctl  # made once in the zygote, so that workers do not each make it on pages of their own


def die_with_hub(hub: int) -> None:
    """Let the kernel end this process, a child of the hub's main thread, when that thread ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != hub:
        os._exit(1)  # the hub ended before the line above


def expose(name: str, file: str) -> None:
    """Make a module, or a package by its ``__init__.py``, importable by its file, leaving ``sys.path`` as it is."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    control, hub, workers = map(int, sys.argv[1:4])
    if not workers:  # without workers it has nothing to do if the hub ends before it is ready
        die_with_hub(hub)
    sys.path[0] = ""  # Python put this file's folder there, whose module names envs must not find
    for place in sys.argv[4:]:
        expose(*place.split("=", 1))
    from envhub_server.worker import zygote

    zygote.main(control, hub)
