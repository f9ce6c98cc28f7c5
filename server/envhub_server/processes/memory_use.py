"""Memory of a worker and the processes that it started."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

from envhub_server.ipc.process_marks import listed_children

PROCESSES_MAX = 1000  # of one worker that are looked at


def memory_bytes(*pids: int) -> int:
    """The resident memory of these processes and their descendants, without files and shared memory such as the arena.

    Pages that a worker shares with its zygote count, some tens of megabytes. A process that has ended counts as 0.
    """
    total, family = 0, [*pids]
    for each in family:  # the list grows during the loop
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += _resident_bytes(each)
            if len(family) < PROCESSES_MAX:
                family += listed_children(each) or ()  # a search of every process would cost too much
    return total


def _resident_bytes(pid: int) -> int:
    _, resident, shared = Path(f"/proc/{pid}/statm").read_bytes().split()[:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE
