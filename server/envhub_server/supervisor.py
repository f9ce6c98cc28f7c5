"""The processes of a hub: a zygote started by exec, workers forked by it, and whatever the envs of these left behind.

Workers are watched by pidfd and ended with their whole process group. Everything here runs in the hub's main thread:
the kernel ends a zygote or worker when that thread ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import envhub
import envhub_server
from envhub import codec
from envhub_server import control
from envhub_server.channel import DESCRIPTORS_MAX, Channel, ChannelClosed
from envhub_server.ends import Ending
from envhub_server.watch import Watch

_RING = (1).to_bytes(8, sys.byteorder)
PR_SET_CHILD_SUBREAPER = 36
LAST_READS_MAX = 256  # of a worker that has ended; a child of its that still talks must not be heard for ever

# What is read when a process starts, or when what the zygote imports is imported: a zygote is of one world as far as
# these go. The rest of a program's environment is put in place in each worker.
START_VARIABLES = (
    *("LD_", "GLIBC_", "MALLOC_", "LANG", "LC_", "PYTHON"),
    *("NPY_", "NUMPY_", "OMP_", "KMP_", "GOMP_", "OPENBLAS_", "GOTO_", "MKL_", "BLIS_", "VECLIB_", "NUMEXPR_"),
)


@dataclass(frozen=True)
class Handlers:
    """Who is told of a worker: each of its messages, at the very end how it ended, and first of all its process id."""

    message: Callable[[Any], None]
    exited: Callable[[Ending], None]
    born: Callable[[int], None] = lambda pid: None


def _locations() -> list[str]:
    codec_file = importlib.util.find_spec("msgpack_numpy")
    assert codec_file is not None and codec_file.origin is not None
    folders = {package.__name__: str(Path(package.__file__ or "").parent) for package in (envhub, envhub_server)}
    return [f"{name}={place}" for name, place in {**folders, "msgpack_numpy": codec_file.origin}.items()]


class WorkerProcess:
    """One worker as the hub sees it, from before its birth until it is reaped.

    Attributes:
        pid: its process id, which is also its process group's; None until it is born.
    """

    def __init__(self, watch: Watch, handlers: Handlers, on_end: Callable[[WorkerProcess], None]) -> None:
        """Make its channel and bell; the zygote makes the process.

        Raises:
            OSError: no descriptor is to be had; nothing is left behind.
        """
        self.pid: int | None = None
        self._watch = watch
        self._handlers = handlers
        self._on_end = on_end
        self._pidfd = -1
        self._over = False
        self._nonsense = ""
        self._why = "what its zygote wrote to stderr says more"
        ours, self.far_end = socket.socketpair()
        try:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            ours.close()
            self.far_end.close()
            raise
        ours.setblocking(False)
        self._channel = Channel(ours)
        watch.watch(ours.fileno(), self.hear)

    def tell(self, message: Any, *descriptors: int) -> None:
        """Send a message; to one that has ended it is lost, and ``exited`` is about to be called."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send(message, descriptors)
            self._watch.watch_writable(self._channel.fileno(), self._channel.backlogged)

    def map_arena(self, message: control.MapArena, memory: int, *bells: int) -> None:
        """Send the arena with the bell that ``ring`` rings, the client's, and those by which it wakes them."""
        self.tell(message, memory, self._bell, *bells)

    def ring(self) -> None:
        """Wake the worker. Unconditional: knowing whether it sleeps would need a fence that Python lacks."""
        os.write(self._bell, _RING)

    def kill(self) -> None:
        """End the worker and every process it started that stayed in its group."""
        if self._over:
            return  # once reaped, the number may be somebody else's
        if self.pid is None:
            self._channel.shutdown()  # should its process come yet, it finds that and ends
            while self.hear() and self.pid is None:
                pass  # it may have come already, and have work to do
        if self.pid is None:
            if not self._over:
                self._end("was not started")
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def hear(self) -> bool:
        """Handle the next of what the worker has said; whether there may be more."""
        try:
            self._channel.flush()
            self._watch.watch_writable(self._channel.fileno(), self._channel.backlogged)
            found = self._channel.receive()
            for message in found or []:
                self._on_message(message)
            return found is not None
        except ChannelClosed:
            # Only a hint: a child that the env forked may hold the other end, or have closed it. The pidfd decides.
            self._watch.unwatch(self._channel.fileno())
            if self.pid is None:
                self._end(f"could not be started: {self._why}")
        except codec.DecodeError as error:
            # It has lost its mind; its exit is handled as any other.
            self._nonsense = f", having sent what cannot be read: {error}"
            self.kill()
        return False

    def _on_message(self, message: Any) -> None:
        match message:
            case control.Born(pid) if self.pid is None:
                self._on_born(pid)
            case control.NotBorn(reason):
                self._why = reason
            case _:
                self._handlers.message(message)

    def _on_born(self, pid: int) -> None:
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)  # it is not reaped, so the number is still its own
        except OSError as error:
            self.kill()
            os.waitpid(pid, 0)
            self._end(f"cannot be watched: {error}")
            return
        self._watch.watch(self._pidfd, self._on_exit)
        self._handlers.born(pid)

    def _on_exit(self) -> None:
        assert self.pid is not None
        self.kill()  # the rest of its group, so that nobody writes to the arena or the channel any more
        for _ in range(LAST_READS_MAX):  # what it said before it ended, such as why it could not build its envs
            if not self.hear():
                break
        self._watch.unwatch(self._pidfd)
        os.close(self._pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        ended_by = signal.Signals(-code).name if code < 0 else ""
        self._end(how + self._nonsense, ended_by, None if code < 0 else code)

    def _end(self, how: str, ended_by: str = "", status: int | None = None) -> None:
        self.discard()
        self._on_end(self)
        self._handlers.exited(Ending(how, ended_by, status))

    def dump(self) -> None:
        """Have the worker write where its threads are."""
        if not self._over and self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGUSR1)

    def discard(self) -> None:
        """Free what the hub holds of it; its process has ended or was never asked for."""
        self._over = True
        self._watch.unwatch(self._channel.fileno())
        self._channel.close()
        self.far_end.close()
        os.close(self._bell)


class Zygote:
    """The process that forks workers, in one environment and working directory."""

    def __init__(
        self,
        watch: Watch,
        python: str,
        environ: Mapping[str, str] | None,
        on_end: Callable[[Zygote], None],
    ) -> None:
        """Start the process with this interpreter, and have ``on_end`` called once it has ended.

        Raises:
            OSError: no process or descriptor is to be had; nothing is left behind.
        """
        self.world = _world(environ)
        self._watch = watch
        self._on_end = on_end
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            ours.setblocking(False)
            with theirs:
                self._process = subprocess.Popen(
                    [
                        python,
                        os.path.join(os.path.dirname(__file__), "boot.py"),
                        str(theirs.fileno()),
                        str(os.getpid()),
                        *_locations(),
                    ],
                    stdin=subprocess.DEVNULL,
                    env={**(os.environ if environ is None else environ), **control.ONE_THREAD},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self._pidfd = os.pidfd_open(self._process.pid)
            self._channel = Channel(ours)
            undo.pop_all()
        watch.watch(self._pidfd, self.reap)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can fork workers."""
        return self._process.poll() is None

    def fork(self, workers: Sequence[WorkerProcess]) -> None:
        """Ask for the processes of these workers, and give their ends away.

        Raises:
            OSError: the zygote does not take the request, because it has ended or is stopped.
        """
        ends = [worker.far_end for worker in workers]
        try:
            for start in range(0, len(ends), DESCRIPTORS_MAX):
                part = ends[start : start + DESCRIPTORS_MAX]
                self._channel.send(control.StartWorkers(len(part)), [end.fileno() for end in part])
        except (ChannelClosed, RuntimeError) as error:
            raise OSError(f"the zygote does not answer: {error}") from error
        finally:
            for end in ends:
                end.close()

    def retire(self) -> None:
        """Let it end once it has forked what it was asked for."""
        self._channel.close()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def reap(self) -> None:
        """Wait for the end of its process and free what watched it."""
        self._process.wait()
        self._watch.unwatch(self._pidfd)
        os.close(self._pidfd)
        self._channel.close()
        self._on_end(self)


def _world(environ: Mapping[str, str] | None) -> dict[str, str] | None:
    if environ is None:
        return None
    return {name: value for name, value in environ.items() if name.startswith(START_VARIABLES)}


class Supervisor:
    """The zygote and all that came of it."""

    def __init__(self, watch: Watch, python: str) -> None:
        """Make this process the parent of everything below it that loses its own."""
        self._python = python
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._watch = watch
        self._zygotes: list[Zygote] = []  # the last is the one in use, the others are about to end
        self._workers: set[WorkerProcess] = set()

    def start(self, handlers: Sequence[Handlers], environ: Mapping[str, str] | None = None) -> list[WorkerProcess]:
        """Start one worker per entry of ``handlers``, of a process started in this environment (the hub's if None).

        Raises:
            OSError: there are no descriptors or processes left; no worker was started.
        """
        zygote = self._zygote(environ)
        workers: list[WorkerProcess] = []
        try:
            for handler in handlers:
                workers.append(WorkerProcess(self._watch, handler, self._on_end))
            zygote.fork(workers)
        except OSError:
            for worker in workers:
                worker.discard()
            raise
        self._workers.update(workers)
        return workers

    def _zygote(self, environ: Mapping[str, str] | None) -> Zygote:
        """The zygote of this world. A fork cannot move to another, so a program that changed its own gets a new one."""
        if self._zygotes:
            current = self._zygotes[-1]
            if current.alive and current.world == _world(environ):
                return current
            current.retire()
        zygote = Zygote(self._watch, self._python, environ, self._zygotes.remove)
        self._zygotes.append(zygote)
        return zygote

    def _on_end(self, worker: WorkerProcess) -> None:
        self._workers.discard(worker)
        self.reap_orphans()

    def reap_orphans(self) -> None:
        """Take the exit status of processes that an env started and left behind; nobody else will."""
        if any(worker.pid is None for worker in self._workers):
            return  # its process may have ended already, and its status is wanted
        known = {worker.pid for worker in self._workers} | {zygote.pid for zygote in self._zygotes}
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in known:
                    return  # its own handler sees to it first; a worker's calls this again
                os.waitpid(found.si_pid, 0)

    def close(self) -> None:
        """End the zygotes, and whatever envs left behind; the workers are ended by their sessions."""
        for zygote in list(self._zygotes):
            zygote.kill()
            zygote.reap()
        for orphan in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
