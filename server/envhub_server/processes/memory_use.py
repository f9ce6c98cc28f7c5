"""How much memory a worker takes, with what it started."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from envhub_server.ipc.process_marks import listed_children

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROCESSES_MAX = 1000  # of one worker that are looked at


def memory_bytes(*pids: int) -> int:
    """The resident memory of these processes and their descendants, without files and shared memory such as the arena.

    Pages that one has in common with its zygote count, some tens of megabytes. A process that has ended counts as 0.
    """
    total, found = 0, [*pids]
    for each in found:  # which grows
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, resident, shared = Path(f"/proc/{each}/statm").read_bytes().split()[:3]
            total += (int(resident) - int(shared)) * PAGE_BYTES
            if len(found) < PROCESSES_MAX:
                found += listed_children(each) or ()  # to look at every process would cost too much
    return total
