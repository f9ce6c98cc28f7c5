"""The process in which a worker runs, its standard streams, and the stack dumps that it writes there."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys

from envhub.process import STACKS
from envhub_server.ipc.channel import moved_up


class StackDumps:
    """Writes the stacks of all threads when the hub wants them and at a crash, whatever the process is doing."""

    def __init__(self, output: int, error: int) -> None:
        """Replace the standard output and error by these pipes; closes both descriptors."""
        # A copy of its own: an env may close or redirect its standard error.
        self._descriptor = moved_up(os.dup(error))
        for standard, pipe in ((1, output), (2, error)):
            os.dup2(pipe, standard)
            os.close(pipe)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A killed worker loses no line, and no other process writes into the middle of one.
                stream.reconfigure(line_buffering=True, write_through=False)
        self.arm()

    def arm(self) -> None:
        # ``faulthandler`` ignores a second call unless it is disabled first.
        faulthandler.disable()
        faulthandler.unregister(STACKS)
        faulthandler.enable(self._descriptor)
        faulthandler.register(STACKS, self._descriptor, all_threads=True)

    def keep(self) -> int:
        """Write the stack of the main thread into a file in memory from now on; returns its descriptor, -1 for none.

        An env that is slow to close is no failure, and its stack nothing to print.
        """
        try:
            descriptor = moved_up(os.memfd_create("envhub-stacks"))
        except OSError:  # there is no descriptor left
            return -1
        faulthandler.unregister(STACKS)
        faulthandler.register(STACKS, descriptor, all_threads=False)
        return descriptor


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
