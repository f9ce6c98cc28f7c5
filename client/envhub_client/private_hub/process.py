"""The private hub of this program: started when it is first wanted, ended when the program ends, however it ends."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from envhub.errors import HubUnreachable
from envhub.process import blocked
from envhub.transport.address import environment
from envhub.transport.descriptors import DescriptorReader, above_stdio
from envhub_client.connection.local_sockets import OwnHub
from envhub_client.private_hub.program_environment import own_flags, start_flags

WORKER = "envhub_server.worker.zygote"  # only ever imported by the process that workers are forked from
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 1.0
MEMORY = "/dev/shm"  # where files are in memory, with short paths, also where all other folders are read-only

# The program's folder and the empty entry come first in its path; the hub must not find a zmq.py of theirs. The folders
# of the hub's packages are added here and not to PYTHONPATH: the hub's first zygote needs the program's own variables.
# Before all that it leaves the program's process group: Ctrl-C on the terminal is the program's, not the hub's.
_BOOT = "import os, sys; os.setpgid(0, 0); sys.path[:] = filter(None, {} + sys.path); "
_BOOT += "from envhub_server.private_hub import main; main{}"


class PrivateHub:
    """A hub process for this program only: it removes its sockets' paths, so that none else connects or listens."""

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._held: list[int] = []  # descriptors, while it is started
        self._line: socket.socket | None = None  # by which it is told to stop
        self._reader: DescriptorReader | None = None  # owns what comes through the socket pair
        self._sockets: list[int] = []  # the files of the hub's socket and side socket, once it listens
        self._pidfds: list[int] = []  # one, once it listens

    def start(self) -> None:
        if WORKER in sys.modules:
            raise HubUnreachable(
                "a worker starts no hub of its own: an env makes its vector env by gymnasium.vector.SyncVectorEnv, "
                "whose results are equal. Where a module was imported there to make an env, and makes envs when it is "
                'imported: put what only the program itself is to do under `if __name__ == "__main__":`, or pass the '
                "address of a hub"
            )
        held = self._held
        try:
            held += (end.detach() for end in socket.socketpair())
            held.append(os.pidfd_open(self.owner_pid))
            held[:] = map(above_stdio, held)
            memory = MEMORY if os.access(MEMORY, os.W_OK) else None
            with tempfile.TemporaryDirectory(prefix="envhub-", dir=memory, ignore_cleanup_errors=True) as folder:
                self._spawn(program=held[2], line_end=held[1], folder=folder)
                os.close(held.pop(1))
                self._line = socket.socket(fileno=held.pop(0))
                self._await(self._line)
            _close(held)
            self._pidfds.append(os.pidfd_open(self.pid))
        except BaseException:  # an interrupt, too, must not leave it behind
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self.forget()
            raise

    def _spawn(self, program: int, line_end: int, folder: str) -> None:
        with blocked():
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *start_flags(sys.flags),
                    "-c",
                    _BOOT.format(_package_folders(), (program, line_end, folder, own_flags())),
                ],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=environment(os.environ),  # as ``program_environment`` sends it; C code may have set other variables
                pass_fds=[program, line_end],
            )

    def _await(self, hub: socket.socket) -> None:
        poller = select.poll()
        poller.register(hub, select.POLLIN)
        ready = poller.poll(START_TIMEOUT_S * 1000)
        if ready:
            self._reader = DescriptorReader(hub)
            if self._reader.read(1):
                self._reader.descriptors[:] = map(above_stdio, self._reader.descriptors)
                self._sockets = [*self._reader.descriptors]
                return
        why = f"it was silent for {START_TIMEOUT_S:g} s"
        if ready and self._process is not None:  # the end of the stream: it has ended, or is about to
            why = f"it exited with status {self._process.wait(STOP_TIMEOUT_S)}"
        raise HubUnreachable(f"the private hub did not start: {why}; what it wrote to stderr says more")

    @property
    def address(self) -> str:
        """Address for processes of this user, as long as this program lets them look into it."""
        return f"ipc:///proc/{self.owner_pid}/fd/{self._sockets[0]}"

    @property
    def own(self) -> OwnHub:
        return OwnHub(self._pidfds[0], self._sockets[0], self._sockets[1])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if the process runs and belongs to this process, not to one that this was forked from."""
        ours = bool(self._pidfds) and self.owner_pid == os.getpid()
        return ours and self._process is not None and self._process.poll() is None

    def forget(self) -> None:
        """Free what is held of a process that has ended; connections have descriptors of their own."""
        atexit.unregister(self.stop)
        _close(self._held)
        _close(self._pidfds)
        for owner in (self._reader, self._line):
            if owner is not None:
                owner.close()

    def stop(self) -> None:
        """End the process; should it take its time, it ends on its own once the program is gone."""
        if self.alive and self._process is not None and self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(b"1")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)


def _close(descriptors: list[int]) -> None:
    """Close them, each once, however often it is called."""
    while descriptors:
        os.close(descriptors.pop())


_lock = threading.Lock()
_hub: PrivateHub | None = None


def private_hub() -> PrivateHub:
    global _hub
    with _lock:
        if _hub is None or not _hub.alive:
            if _hub is not None and _hub.owner_pid == os.getpid():
                _hub.forget()
            _hub = PrivateHub()
            atexit.register(_hub.stop)
            _hub.start()
        return _hub


def _forked() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_forked)


def _package_folders() -> list[str]:
    folders = []
    for name in ("envhub", "envhub_server"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise HubUnreachable(f"the package {name} is not installed next to this client; pass the address of a hub")
        folders.append(str(Path(spec.origin).parent.parent))
    return folders
