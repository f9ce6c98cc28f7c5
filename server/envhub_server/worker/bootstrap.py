"""The first lines of a zygote: ``python bootstrap.py CONTROL_FD HUB_PID WORKERS NAME=LOCATION …``.

``WORKERS`` is how many live already, which the zygote is to guard. Each location says where a package or module stands
that the workers import, so that nothing else of the hub's installation comes into the envs' ``sys.path``: an
interpreter of another version must not find the hub's NumPy.
"""

import ctypes
import importlib.util
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

prctl = ctypes.CDLL(None).prctl  # one object for all workers of a zygote: each would make its own, on pages of its own


def die_with_hub(hub: int) -> None:
    """Have the kernel end this process, a child of the hub's main thread, when that thread ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != hub:
        os._exit(1)  # the hub ended before the line above


def expose(name: str, location: str) -> None:
    """Make a package or module importable by its location alone, leaving ``sys.path`` as it is."""
    if os.path.isdir(location):
        path = os.path.join(location, "__init__.py")
        spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[location])
    else:
        spec = importlib.util.spec_from_file_location(name, location)
    assert spec is not None and spec.loader is not None, location
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    control, hub, workers = map(int, sys.argv[1:4])
    if not workers:  # nobody needs it if the hub ends before it is ready
        die_with_hub(hub)
    sys.path[0] = ""  # Python put this file's folder there; its module names are not the env's business
    for place in sys.argv[4:]:
        expose(*place.split("=", 1))
    from envhub_server.worker import zygote

    zygote.main(control, hub)
