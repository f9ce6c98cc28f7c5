"""The hub's side of the zygote, which forks workers and, if the hub is killed, ends the processes that are left."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgpack_numpy

import envhub
import envhub_server
from envhub.transport.fd_passing import DESCRIPTORS_MAX
from envhub_server.ipc import control, process_marks
from envhub_server.ipc.channel import Channel, ChannelClosed
from envhub_server.loop.poller import Poller, Source
from envhub_server.processes.worker_handle import WorkerHandle

# Variables that are read when a process starts, or by the modules that the zygote imports: these cannot be changed in a
# fork. Each worker sets the other variables of a program's environment itself.
START_VARIABLES = (
    *("LD_", "GLIBC_", "MALLOC_", "LANG", "LC_", "PYTHON"),
    *("NPY_", "NUMPY_", "OMP_", "KMP_", "GOMP_", "OPENBLAS_", "GOTO_", "MKL_", "BLIS_", "VECLIB_", "NUMEXPR_"),
)
# What workers of a public hub get besides, for the programs and libraries that envs use. Others may be secrets.
KEPT_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TZ", "TERM", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV"),
    *("CONDA_PREFIX", "DISPLAY", "XAUTHORITY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"),
)
KEPT_PREFIXES = (
    *START_VARIABLES,
    *("CUDA_", "NVIDIA_", "ROCR_", "HIP_", "JAX_PLATFORM", "XLA_", "TORCH_", "TF_"),
    *("MUJOCO_", "PYOPENGL_", "EGL_", "MESA_", "LIBGL_", "GALLIUM_", "VK_", "SDL_", "PYGAME_", "QT_"),
)
DESCRIPTORS_PER_WORKER = 3  # its channel, its standard output and its standard error
_BOOTSTRAP = str(Path(__file__).parents[1] / "worker" / "bootstrap.py")
_FILES = [f"{module.__name__}={module.__file__}" for module in (envhub, envhub_server, msgpack_numpy)]

Environment = Mapping[str, str]  # variables, by name


def clean_environment(environ: Environment, names: Collection[str]) -> Environment:
    """What the workers of a public hub get of its environment: what programs need to run, and the named variables."""
    kept = {*KEPT_VARIABLES, *names}
    return {name: value for name, value in environ.items() if name in kept or name.startswith(KEPT_PREFIXES)}


def start_environment(environ: Environment) -> Environment:
    """The variables that a zygote must be started with."""
    return {name: value for name, value in environ.items() if name.startswith(START_VARIABLES)}


class ZygoteHandle:
    """The process that forks workers, in one environment and working directory."""

    def __init__(
        self, poller: Poller, python: str, hub: str, environ: Environment, workers: Sequence[int], parent: Source
    ) -> None:
        """Start the process with this interpreter; it guards ``workers``, and ``parent`` must ``reap`` it.

        Raises:
            OSError: there is no process or descriptor left; nothing is left behind.
        """
        self.environ = environ
        self._channel_closed = False
        self._poller = poller
        marked = {process_marks.VARIABLE: process_marks.mark(hub, process_marks.NO_WORKER)}
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            ours.setblocking(False)
            with theirs:
                self._process = subprocess.Popen(
                    [python, _BOOTSTRAP, *map(str, (theirs.fileno(), os.getpid(), len(workers))), *_FILES],
                    stdin=subprocess.DEVNULL,
                    env={**environ, **control.ONE_THREAD, **marked},
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
        """Whether it can fork workers; a zygote that is being killed has closed its channel."""
        self.on_ready(-1)
        return not self._channel_closed and self._process.poll() is None

    def fork(self, workers: Sequence[WorkerHandle]) -> None:
        """Request the processes of these workers, and close the hub's copies of their descriptors.

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
        """Have it end these workers and their descendants if the hub is killed."""
        self._send(control.Guard(list(pids)))

    def reaped(self, pid: int) -> None:
        """Report that this worker was reaped: another process may have its pid from now on."""
        self._send(control.Reaped(pid))

    def _send(self, message: object) -> None:
        with contextlib.suppress(ChannelClosed):  # it has ended, and is about to be reaped
            self._channel.send(message)
            self._poller.want_writable(self._channel.fileno(), self._channel.backlogged)

    def on_ready(self, descriptor: int) -> None:
        """Send what waits for room, or notice that the zygote has ended; it sends no message by this channel."""
        try:
            self._channel.flush()
            self._channel.receive()
            self._poller.want_writable(self._channel.fileno(), self._channel.backlogged)
        except ChannelClosed:
            self._channel_closed = True
            self._poller.unregister(self._channel.fileno())

    def retire(self) -> None:
        """Let it exit once it has forked the workers that were requested."""
        self._send(control.Retire())
        if self._channel.backlogged:  # a channel that ends without this message means that the hub was killed
            self.kill()
        self._close_channel()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def reap(self) -> None:
        """Wait until its process has ended, and free its descriptors."""
        self._process.wait()
        self._poller.unregister(self.pidfd)
        os.close(self.pidfd)
        self._close_channel()

    def _close_channel(self) -> None:
        if self._channel.fileno() >= 0:
            self._poller.unregister(self._channel.fileno())
        self._channel.close()
