"""Tells if this process is a worker of a hub."""

from __future__ import annotations

import sys

WORKER = "envhub_server.worker.zygote"  # only ever imported by the process that workers are forked from
_IMPORTING = "<frozen importlib._bootstrap>"  # the file of the frames that import a module


def is_env_of_worker() -> bool:
    """True if this process is a worker and an env runs in it.

    False while a module is imported there, which may be the program itself.
    """
    frame = sys._getframe() if WORKER in sys.modules else None
    in_worker = frame is not None
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return False
        frame = frame.f_back
    return in_worker
