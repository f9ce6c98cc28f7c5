"""What the workers of a session import, imported once before they are forked. Python 3.8 and later.

Forked from a process that has it, the workers share its pages and take no time for it. The session's first workers have
imported it by themselves before, so that what is wrong with it was told by then.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
from typing import Any

from envhub_server.surroundings import load

PRELOAD_S = 60  # it is ended then, and the workers import by themselves


def preloaded(preload: Any, output: int, error: int) -> bool:
    """Import it all, with what it prints going to these descriptors; whether this process may be forked into workers.

    It may not where a module has started a thread or a process, or has opened something: no two workers may share that.
    """
    os.dup2(output, 1)
    os.dup2(error, 2)
    descriptors = _descriptors()
    signal.alarm(PRELOAD_S)  # unless a module handles it, it ends the process even in the middle of C code
    try:
        load(preload.build)
        for name in preload.modules:
            with contextlib.suppress(Exception):  # some are made by others, and cannot be imported
                importlib.import_module(name)
    except BaseException:  # each worker will tell of it
        return False
    signal.alarm(0)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else each worker would print it once more
    gc.collect()
    gc.freeze()  # as in the zygote
    return _descriptors() == descriptors and len(os.listdir("/proc/self/task")) == 1 and not _has_children()


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
