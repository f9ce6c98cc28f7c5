"""Listening: which addresses a hub may bind, and the files that an ipc address leaves while it is bound."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import zmq

from envhub import address, wire
from envhub.address import Address
from envhub.errors import AddressError


class Binding:
    """The addresses of one ROUTER.

    libzmq binds an ipc path that another hub listens on without a word and so steals it; the lock beside the path is
    what keeps two hubs apart, and what tells a dead hub's socket file from a living one's.
    """

    def __init__(self, router: zmq.Socket[Any], insecure: bool) -> None:
        self._router = router
        self._insecure = insecure
        self._paths: list[Path] = []
        self._locks: list[tuple[Path, int]] = []

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
        wire.choose_family(self._router, wanted)
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
        path.unlink(missing_ok=True)  # a killed hub's: whoever listens holds the lock
        self._paths.append(path)

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

    def close(self) -> None:
        """Remove the files of the ipc addresses; the ROUTER is closed by then."""
        for path in self._paths:
            path.unlink(missing_ok=True)
        for lock, descriptor in self._locks:
            with contextlib.suppress(OSError):
                lock.unlink(missing_ok=True)
            os.close(descriptor)
        self._paths.clear()
        self._locks.clear()


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
