"""How much memory a worker takes, with what it started."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROCESSES_MAX = 1000  # of one worker that are looked at
PROC = Path("/proc")


def memory_bytes(*pids: int) -> int:
    """The resident memory of these processes and their descendants, without files and shared memory such as the arena.

    Pages that one has in common with its zygote count, some tens of megabytes. A process that has ended counts as 0.
    """
    total, found = 0, [*pids]
    for each in found:  # which grows
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, resident, shared = (PROC / str(each) / "statm").read_bytes().split()[:3]
            total += (int(resident) - int(shared)) * PAGE_BYTES
            if len(found) < PROCESSES_MAX:
                found += children(each)
    return total


def children(pid: int) -> list[int]:
    """The children of this process; empty where the kernel does not list them, which costs a look at every process."""
    with contextlib.suppress(OSError, ValueError):
        tasks = os.listdir(PROC / str(pid) / "task")
        return [
            int(child)
            for task in tasks
            for child in (PROC / str(pid) / "task" / task / "children").read_bytes().split()
        ]
    return []
