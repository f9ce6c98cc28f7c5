"""Worker processes: started by exec, watched by pidfd, ended with their whole process group.

A worker is started with ``subprocess`` and never forked from the hub, so it inherits neither the hub's sockets nor its
memory. Everything here runs in the hub's main thread: the kernel ends a worker when the thread that started it does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import envhub
import envhub_server
from envhub_server.channel import Channel

_RING = (1).to_bytes(8, sys.byteorder)

# Several workers that each start a thread per core make every one of them slower, so each gets one.
ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "BLIS_NUM_THREADS",
    ),
    "1",
)


def _locations() -> list[str]:
    codec = importlib.util.find_spec("msgpack_numpy")
    assert codec is not None and codec.origin is not None
    folders = {package.__name__: str(Path(package.__file__ or "").parent) for package in (envhub, envhub_server)}
    return [f"{name}={place}" for name, place in {**folders, "msgpack_numpy": codec.origin}.items()]


class WorkerProcess:
    """One worker as the hub sees it.

    Attributes:
        number: its index in its session.
        pidfd: readable once the process has ended.
        channel: the hub's end of the control channel.
        bell: an eventfd that wakes the worker for the rows in the arena.
    """

    def __init__(self, number: int, environ: Mapping[str, str] | None = None, cwd: str | None = None) -> None:
        """Start the process.

        Raises:
            OSError: no process or descriptor is to be had, or ``cwd`` does not exist; nothing is left behind.
        """
        self.number = number
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            ours.setblocking(False)
            self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self.bell)
            with theirs:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        os.path.join(os.path.dirname(__file__), "boot.py"),
                        str(theirs.fileno()),
                        str(os.getpid()),
                        *_locations(),
                    ],
                    stdin=subprocess.DEVNULL,
                    cwd=cwd,
                    env={**(os.environ if environ is None else environ), **ONE_THREAD},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self.pidfd = os.pidfd_open(self._process.pid)
            self.channel = Channel(ours)
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The process id, which is also its process group's."""
        return self._process.pid

    def ring(self) -> None:
        """Wake the worker. Unconditional: knowing whether it sleeps would need a fence that Python lacks."""
        os.write(self.bell, _RING)

    def kill(self) -> None:
        """End the worker and every process it started that stayed in its group."""
        if self._process.returncode is None:  # once reaped, the number may be somebody else's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Once the pidfd is readable: end what is left of the group, take the exit status, free the descriptors.

        Returns:
            How the process ended, such as ``exited with status 3`` or ``was ended by SIGSEGV``.
        """
        self.kill()
        status = self._process.wait()
        os.close(self.pidfd)
        os.close(self.bell)
        self.channel.close()
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
