"""The process in which a worker runs."""

from __future__ import annotations

import contextlib
import os

from envhub_server.worker.stack_dumps import StackDumps


class Host:
    """A process of the worker's own."""

    def __init__(self, stack_dumps: StackDumps | None = None) -> None:
        """``stack_dumps`` are those of a process that is a worker to its end."""
        self._stack_dumps = stack_dumps

    def pin(self, cpu: int | None) -> None:
        if cpu is None:
            return
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(thread), [cpu])

    def arm_stack_dumps(self) -> None:
        """Write stack dumps again on the signals whose handlers an env may have replaced."""
        if self._stack_dumps is not None:
            self._stack_dumps.arm()

    def keep_stacks(self) -> int:
        """Keep the stacks that are asked for in a file of this process; returns its descriptor, -1 for none."""
        return -1 if self._stack_dumps is None else self._stack_dumps.keep()

    def crash(self) -> None:
        """End as at a crash: the hub decides how often to try again."""
        os._exit(1)


def private_bytes() -> int:
    try:
        with open("/proc/self/smaps_rollup", "rb") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(line[1]) * 1024 for line in lines if line[0] in (b"Private_Dirty:", b"Private_Clean:"))
