"""A worker's standard output and error, which are pipes to its hub, and the stacks that it writes there when asked to.

Python 3.8 and later.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys

from envhub_server.ipc.channel import moved_up


class Dumps:
    """Writes the stacks of all threads on SIGUSR1, whatever the process is doing, and where it crashes."""

    def __init__(self, output: int, error: int) -> None:
        """Have these pipes, which are closed here, in place of the standard output and error."""
        # A copy of its own: an env may close or redirect its standard error.
        self._descriptor = moved_up(os.dup(error))
        for standard, pipe in ((1, output), (2, error)):
            os.dup2(pipe, standard)
            os.close(pipe)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # What a worker printed is to be seen if it is killed, and no other's word in the middle of a line.
                stream.reconfigure(line_buffering=True, write_through=False)
        self.arm()

    def arm(self) -> None:
        """Be ready; once more after code has run that may have changed how signals are handled."""
        # What it is ready for already, it would not look at again.
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.enable(self._descriptor)
        faulthandler.register(signal.SIGUSR1, self._descriptor, all_threads=True)
