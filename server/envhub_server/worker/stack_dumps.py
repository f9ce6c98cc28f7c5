"""A worker's standard output and error, which are pipes to its hub, and the stack dumps that it writes there."""

from __future__ import annotations

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
