"""A process that is the other end of what ``envhub bench`` times: of raw pyzmq, or of a rival that has a server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

from envhub.errors import HubUnreachable

STOP_TIMEOUT_S = 5.0


@contextlib.contextmanager
def peer(module: str, role: str, *arguments: object) -> Iterator[str]:
    """Call this function of this module in a process of its own, which ends with the block.

    Args:
        module: where the function is.
        role: its name. It prints an address, calls ``end_with_stdin``, and then serves without end.
        *arguments: what it is called with; their ``repr`` must say all of them.

    Yields:
        The address it printed.

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
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also where a second Ctrl-C ended the wait
        process.kill()


def end_with_stdin() -> None:
    """End this process as soon as its stdin does, which is when the program that started it is gone."""
    # A thread and not a poller, which every message would pay for.
    threading.Thread(target=_exit_with_stdin, daemon=True).start()


def _exit_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
