"""What the import of each shared library that is installed here leaves behind, in a process like a zygote."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from envhub_server.ipc.packages import LIBRARIES
from envhub_server.processes.interpreter import ONE_THREAD
from envhub_server.worker.shared_process import GENERATORS


def state() -> dict[str, Any]:
    """What two envs must not share, and what no library of a zygote may change."""
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "handlers": {number: repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "registry": sorted(gymnasium.registry),
        "variables": dict(os.environ),
        "random": repr(random.getstate()),
        "numpy.random": repr(np.random.get_state()),
        "folder": os.getcwd(),
        "generators": sorted(generators()),
    }


def generators() -> set[str]:
    """Those of all modules that a worker does not seed."""
    torch = sys.modules.get("torch")
    kinds = random.Random, np.random.RandomState, np.random.Generator, *([] if torch is None else [torch.Generator])
    seeded = [getattr(sys.modules.get(module), name, None) for module, name in GENERATORS]
    found = set()
    for module in [*sys.modules.values()]:
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            if isinstance(value, kinds) and not any(value is each for each in seeded):
                found.add(f"{module.__name__}.{name}")
    return found


def of_shared_libraries() -> dict[str, list[str]]:
    """By the name of the library, the parts of ``state`` that its import changed, in a process of its own."""
    environ = {**os.environ, **ONE_THREAD}
    found = subprocess.run([sys.executable, __file__], env=environ, stdout=subprocess.PIPE, check=True, timeout=100)
    return json.loads(found.stdout)  # type: ignore[no-any-return]


def _import_all() -> dict[str, list[str]]:
    changed = {}
    for name in LIBRARIES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            before = state()
            importlib.import_module(name)
            changed[name] = [part for part, value in state().items() if value != before[part]]
    return changed


if __name__ == "__main__":
    json.dump(_import_all(), sys.stdout)
