"""A process that is the other end of what is timed: of raw pyzmq, or of a rival that has a server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

from envhub_client.tools.served_hub import stop

from envhub.errors import HubUnreachable

STOP_TIMEOUT_S = 5.0


@contextlib.contextmanager
def peer(module: str, role: str, *arguments: object) -> Iterator[str]:
    """The address that the function ``role`` of this module prints, in a process of its own, which ends with the block.

    The function calls ``announce``, and then serves without end; the ``repr`` of its arguments must say all.

    Raises:
        HubUnreachable: it printed none; the message holds the last line that it wrote to stderr.
    """
    command = [sys.executable, "-c", f"from {module} import {role}; {role}(*{arguments!r})"]
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,  # Ctrl-C on the terminal is the program's, which ends this one
        ) as process,
    ):
        try:
            assert process.stdout is not None
            if not (address := process.stdout.readline().strip()):
                stderr.seek(0)
                raise HubUnreachable(f"{module} did not start: {''.join(stderr.readlines()[-1:]).strip()}")
            yield address
        finally:
            stop(process, STOP_TIMEOUT_S)


def announce(address: str) -> None:
    """Print the address of this process, and end it as soon as its stdin ends: the program that started it is gone."""
    # A thread and not a poller, which every message would pay for.
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    print(address, flush=True)


def _exit_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
