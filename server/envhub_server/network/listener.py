"""Listening: which addresses a hub may bind, and the files that an ipc address leaves while it is bound."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Any

import structlog
import zmq

from envhub.errors import AddressError
from envhub.transport import address, sockets
from envhub.transport.address import Address

# How many connections may wait for libzmq to accept them; they come even when the address is shut. By ipc, where it
# must not run out of descriptors, a client that finds no room tries again at once, by tcp after a second.
IPC_BACKLOG, TCP_BACKLOG = 16, 100

log = structlog.get_logger("envhub.hub")


def seed_routing_ids() -> None:
    """Have the routing ids that the next ROUTER gives out begin at a number that nobody can know.

    libzmq (4.3.5) numbers its peers from ``rand()``, which it never seeds, and does not look whether a peer has chosen
    the next number for itself: it aborts then. So a hub whose numbers are known is ended by any peer.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


class Listener:
    """The addresses of one ROUTER.

    libzmq binds an ipc path that another hub listens on without a word and so steals it; the lock beside the path is
    what keeps two hubs apart, and what tells a dead hub's socket file from a living one's.
    """

    def __init__(self, router: zmq.Socket[Any], insecure: bool) -> None:
        self._router = router
        self._insecure = insecure
        self._paths: list[Path] = []
        self._locks: list[tuple[Path, int]] = []
        # For the place of the ROUTER's while that takes no connections: a socket, and what fills its queue.
        self._full: dict[Path, tuple[socket.socket, socket.socket]] = {}

    def bind(self, text: str) -> str:
        """Bind one address; returns it with the real port where 0 was asked for.

        Raises:
            AddressError: malformed, in use, not ours, or reachable from other machines without ``insecure``.
        """
        wanted = address.parse(text)
        if wanted.is_ipc:
            self._prepare(wanted)
        elif not wanted.is_loopback and not self._insecure:
            raise AddressError(
                f"{text} can be reached from other machines and nothing guards it; "
                "bind tcp://127.0.0.1 or ipc, or say --insecure if the network is yours alone"
            )
        sockets.choose_family(self._router, wanted)
        self._router.setsockopt(zmq.BACKLOG, IPC_BACKLOG if wanted.is_ipc else TCP_BACKLOG)
        try:
            self._router.bind(text.replace("://localhost:", "://127.0.0.1:"))
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressError(f"{text} is in use; end the other server, or choose another port") from error
            raise AddressError(f"{text} cannot be bound: {error}") from error
        bound = self._router.get(zmq.LAST_ENDPOINT)
        return bound.rstrip(b"\0").decode() if isinstance(bound, bytes) else text

    def _prepare(self, wanted: Address) -> None:
        if wanted.path.startswith("@"):
            return
        path = Path(wanted.path)
        if path.parent == address.runtime_folder():
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise AddressError(f"{wanted.text}: the folder {path.parent} cannot be made: {error}") from error
            address.check_private(path.parent)
        if not path.parent.is_dir():
            raise AddressError(f"{wanted.text}: the folder {path.parent} does not exist")
        if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
            raise AddressError(f"{wanted.text}: {path} exists and is no socket; choose another path")
        self._lock(path)
        for left in (path, _aside(path)):
            left.unlink(missing_ok=True)  # a killed hub's: whoever listens holds the lock
        self._paths.append(path)
        self._close_full()
        self._prepare_full()

    def _lock(self, path: Path) -> None:
        lock = path.with_name(path.name + ".lock")
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise AddressError(f"{lock} cannot be made: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise AddressError(f"another hub already listens on ipc://{path}; end it, or bind another path") from error
        if not _same_file(lock, descriptor):  # its last holder removed it in between, so it keeps nobody out
            os.close(descriptor)
            self._lock(path)
            return
        self._locks.append((lock, descriptor))

    def shut(self) -> None:
        """Let nobody else connect by ipc; connections that stand go on.

        Unbinding would end these, too. In the place of the ROUTER's socket another stands meanwhile whose queue is
        full: a client that finds no socket, or one that refuses, must think that the hub is lost.
        """
        for path, (full, plug) in self._full.items():
            os.link(path, _aside(path))
            beside = path.with_name(path.name + ".full")
            beside.unlink(missing_ok=True)
            try:
                full.bind(str(beside))
                full.listen(0)
                plug.connect(str(beside))
                os.rename(beside, path)
            except OSError as error:  # the name is too long
                log.warning("no_socket_in_place", path=str(path), why=str(error))
                path.unlink(missing_ok=True)

    def open(self) -> None:
        """Let clients connect by ipc again."""
        for path in self._full:
            os.rename(_aside(path), path)
        self._close_full()
        self._prepare_full()

    def _prepare_full(self) -> None:
        """Have, while there are descriptors, what ``shut`` needs when there are few."""
        self._full = {path: (socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)) for path in self._paths}

    def _close_full(self) -> None:
        for ends in self._full.values():
            for end in ends:
                end.close()
        self._full.clear()

    def close(self) -> None:
        """Remove the files of the ipc addresses; the ROUTER is closed by then."""
        self._close_full()
        for path in [*self._paths, *map(_aside, self._paths)]:
            path.unlink(missing_ok=True)
        for lock, descriptor in self._locks:
            with contextlib.suppress(OSError):
                lock.unlink(missing_ok=True)
            os.close(descriptor)
        self._paths.clear()
        self._locks.clear()


def _aside(path: Path) -> Path:
    """Where the ROUTER's socket is while clients are not to find it."""
    return path.with_name(path.name + ".aside")


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
