"""The zygote as the hub sees it: it forks the workers, and ends what is left of them should the hub be killed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import envhub
import envhub_server
from envhub.transport.fd_passing import DESCRIPTORS_MAX
from envhub_server.ipc import control, process_marks
from envhub_server.ipc.channel import Channel, ChannelClosed
from envhub_server.loop.poller import Poller, Source
from envhub_server.processes.worker_handle import WorkerHandle

# What is read when a process starts, or when what the zygote imports is imported: a zygote is of one world as far as
# these go. The rest of a program's environment is put in place in each worker.
START_VARIABLES = (
    *("LD_", "GLIBC_", "MALLOC_", "LANG", "LC_", "PYTHON"),
    *("NPY_", "NUMPY_", "OMP_", "KMP_", "GOMP_", "OPENBLAS_", "GOTO_", "MKL_", "BLIS_", "VECLIB_", "NUMEXPR_"),
)
DESCRIPTORS_PER_WORKER = 3  # its channel, its standard output and its standard error


def start_environment(environ: Mapping[str, str] | None) -> dict[str, str] | None:
    """What of an environment a process must have been started in; None stands for the hub's own."""
    if environ is None:
        return None
    return {name: value for name, value in environ.items() if name.startswith(START_VARIABLES)}


_BOOTSTRAP = str(Path(envhub_server.__file__ or "").parent / "worker" / "bootstrap.py")


def _locations() -> list[str]:
    codec_file = importlib.util.find_spec("msgpack_numpy")
    assert codec_file is not None and codec_file.origin is not None
    folders = {package.__name__: str(Path(package.__file__ or "").parent) for package in (envhub, envhub_server)}
    return [f"{name}={place}" for name, place in {**folders, "msgpack_numpy": codec_file.origin}.items()]


class ZygoteHandle:
    """The process that forks workers, in one environment and working directory.

    It outlives a hub that is killed, by as long as it takes to end what the workers left behind.
    """

    def __init__(
        self,
        poller: Poller,
        python: str,
        hub: str,
        environ: Mapping[str, str] | None,
        workers: Sequence[int],
        parent: Source,
    ) -> None:
        """Start the process with this interpreter; it guards ``workers``, and ``parent`` is to ``reap`` it.

        Raises:
            OSError: no process or descriptor is to be had; nothing is left behind.
        """
        self.environ = environ
        self.world = start_environment(environ)
        self._deaf = False
        self._poller = poller
        marked = {process_marks.VARIABLE: process_marks.mark(hub, process_marks.NO_WORKER)}
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            ours.setblocking(False)
            with theirs:
                self._process = subprocess.Popen(
                    [
                        python,
                        _BOOTSTRAP,
                        str(theirs.fileno()),
                        str(os.getpid()),
                        str(len(workers)),
                        *_locations(),
                    ],
                    stdin=subprocess.DEVNULL,
                    env={**(os.environ if environ is None else environ), **control.ONE_THREAD, **marked},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self.pidfd = os.pidfd_open(self._process.pid)
            self._channel = Channel(ours, descriptors_max=0)
            undo.pop_all()
        poller.register(self.pidfd, parent)
        poller.register(ours.fileno(), self)
        self.guard(workers)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can fork workers; one that is being killed has no channel any more."""
        self.on_ready(-1)
        return not self._deaf and self._process.poll() is None

    def fork(self, workers: Sequence[WorkerHandle]) -> None:
        """Ask for the processes of these workers, and give their ends away.

        Raises:
            OSError: the zygote does not take the request, because it has ended or is stopped.
        """
        at_once = DESCRIPTORS_MAX // DESCRIPTORS_PER_WORKER
        try:
            for start in range(0, len(workers), at_once):
                part = workers[start : start + at_once]
                self._channel.send(control.StartWorkers(len(part)), [end for worker in part for end in worker.far_ends])
        except (ChannelClosed, RuntimeError) as error:
            raise OSError(f"the zygote does not answer: {error}") from error
        finally:
            for worker in workers:
                worker.close_far_ends()

    def guard(self, pids: Iterable[int]) -> None:
        """Have it end these workers with all that is theirs, should the hub be killed."""
        self._tell(control.Guard(list(pids)))

    def reaped(self, pid: int) -> None:
        """The number of this worker may be another process's from now on."""
        self._tell(control.Reaped(pid))

    def _tell(self, message: Any) -> None:
        with contextlib.suppress(ChannelClosed):  # it has ended, and is about to be reaped
            self._channel.send(message)
            self._poller.want_writable(self._channel.fileno(), self._channel.backlogged)

    def on_ready(self, descriptor: int) -> None:
        """It says nothing here: there is room for what waits to be said to it, or it has ended."""
        try:
            self._channel.flush()
            self._channel.receive()
            self._poller.want_writable(self._channel.fileno(), self._channel.backlogged)
        except ChannelClosed:
            self._deaf = True
            self._poller.unregister(self._channel.fileno())

    def retire(self) -> None:
        """Let it end once it has forked what it was asked for."""
        self._tell(control.Retire())
        if self._channel.backlogged:  # it would take a channel that ends without that word for a hub that was killed
            self.kill()
        self._close_channel()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def reap(self) -> None:
        """Wait for the end of its process and free what watched it."""
        self._process.wait()
        self._poller.unregister(self.pidfd)
        os.close(self.pidfd)
        self._close_channel()

    def _close_channel(self) -> None:
        if self._channel.fileno() >= 0:
            self._poller.unregister(self._channel.fileno())
        self._channel.close()
