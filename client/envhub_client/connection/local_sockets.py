"""The Unix sockets of a hub on this machine, and the proof of who is behind them: only what this user bound is reached.

Another socket can be put at a path between a check and a connection, and before every reconnection. So a connection is
made to the file of a socket, held open from the check of its owner on: Linux resolves ``/proc/self/fd/N`` to the file
itself, even if its path is gone or names another file. It reaches the process that bound the socket, or is refused once
that process has closed it. macOS cannot hold such a file open. There a connection is made to the path, in a folder in
which, and above which, no other user can replace the socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from envhub.errors import AddressError
from envhub.files import user_text, weakness_of
from envhub.transport.address import side_path

NOWHERE = "/dev/null"  # a path that refuses every connection, as a socket without a listener does
PROBE_S = 0.2
if sys.platform == "win32":
    _FAMILY = socket.AF_UNSPEC  # Python has no Unix sockets there, and ipc addresses are refused
else:
    _FAMILY = socket.AF_UNIX
# For who meets the hub of another user.
KEY_OR_OWN_HUB = (
    "ask that user for a key (`envhub keys add`, `envhub serve --keys`), or start a hub of your own by `envhub serve`"
)


class OtherUsersSocket(PermissionError):
    """The socket was made by another user. ``user``: the id of that user."""

    def __init__(self, path: str, user: int) -> None:
        super().__init__(errno.EPERM, f"is a socket of user {user}", path)
        self.user = user


class SocketFile:
    """The file of a socket, and a ``path`` that leads to it."""

    def __init__(self, path: str, status: os.stat_result, file: FileIO | None = None) -> None:
        self.path, self.status, self._file = path, status, file

    def is_same(self, other: SocketFile) -> bool:
        return os.path.samestat(self.status, other.status)

    def close(self) -> None:
        if self._file is not None:
            self.path = NOWHERE  # the descriptor's number may become that of another file
            self._file.close()


def _held_open(file: FileIO) -> SocketFile:
    return SocketFile(f"/proc/self/fd/{file.fileno()}", os.fstat(file.fileno()), file)


def open_socket_file(path: str) -> SocketFile:
    """Raises ``OtherUsersSocket`` or ``OSError``."""
    opened = SocketFile(path, os.stat(path) if sys.platform == "linux" else os.lstat(path))
    if sys.platform == "win32" or not stat.S_ISSOCK(opened.status.st_mode):
        raise OSError(errno.ENOTSOCK, "is no socket", path)
    if sys.platform == "linux":
        # One call into C opens and stores it: an interrupt in between would leak the descriptor.
        (file,) = map(FileIO, map(os.open, (path,), (os.O_PATH | os.O_CLOEXEC,)))
        opened = _held_open(file)
    if (owner := opened.status.st_uid) != os.getuid():
        opened.close()
        raise OtherUsersSocket(path, owner)
    if sys.platform != "linux" and (weakness := weakness_of(os.path.dirname(path))) is not None:
        raise OSError(errno.EPERM, f"another user could replace it, since {weakness}", path)
    return opened


class OwnHub(NamedTuple):
    """This program's own hub, by descriptors: of its process, and of the files of its socket and its side socket."""

    pidfd: int
    socket: int
    side: int


class LocalSockets:
    """The socket and the side socket of a hub: those at an ipc address, or of ``own``, which keeps its descriptors."""

    def __init__(self, path: str, own: OwnHub | None = None) -> None:
        self._path = path
        self._own = None if own is None else [_held_open(FileIO(os.dup(file))) for file in (own.socket, own.side)]
        self._file: SocketFile | None = None if self._own is None else self._own[0]
        if self._own is None:
            try:
                open_socket_file(path).close()
            except FileNotFoundError:
                pass  # a hub may be about to start there
            except OSError as error:
                raise AddressError(f"ipc://{path} {_why_unusable(path, error)}") from error

    def path(self) -> str:
        """Path to connect to from now on; it refuses connections while there is no hub."""
        if self._own is None:
            self.close()
            self._file = self._opened()
        return NOWHERE if self._file is None else self._file.path

    def has_moved(self) -> bool:
        """True if the path means another socket than the last ``path``, as of a hub that was started again."""
        file = None if self._own is not None else self._opened()
        if file is None:
            return False
        with contextlib.closing(file):
            return self._file is None or not self._file.is_same(file)

    def refuses(self) -> bool:
        if self._file is None:
            return True
        with socket.socket(_FAMILY) as probe:
            probe.settimeout(PROBE_S)
            try:
                probe.connect(self._file.path)
            except OSError as error:
                return isinstance(error, ConnectionRefusedError)
        return False

    def why_silent(self) -> str:
        if self._file is None:
            start = f"start a hub as this user with `envhub serve --bind ipc://{self._path}`"
            return f"there is no socket; {start}, or write the ipc address that a running hub printed"
        if self.refuses():
            return f"its hub has ended; start it again with `envhub serve --bind ipc://{self._path}`"
        return "its hub does not answer; is it stopped or overloaded?"

    def connect_side(self, side: socket.socket) -> None:
        if self._own is not None:
            side.connect(self._own[1].path)
            return
        if (path := side_path(self._path)) is None:
            raise OSError(f"{self._path} is too long for a side socket")
        with contextlib.closing(open_socket_file(path)) as file:
            side.connect(file.path)

    def _opened(self) -> SocketFile | None:
        try:
            return open_socket_file(self._path)
        except OSError:
            return None

    def close(self) -> None:
        for file in self._own or (self._file,):
            if file is not None:
                file.close()


def _why_unusable(path: str, error: OSError) -> str:
    if isinstance(error, OtherUsersSocket):
        return f"belongs to {user_text(error.user)}, and a hub's socket serves its own user alone: {KEY_OR_OWN_HUB}"
    if sys.platform == "win32":
        return str(error)
    by_effective = os.access in os.supports_effective_ids
    parents = reversed(Path(path).parents)
    closed = [each for each in parents if not os.access(each, os.X_OK, effective_ids=by_effective)]
    if error.errno == errno.EACCES and closed:
        user, owner = user_text(os.geteuid()), user_text(closed[0].stat().st_uid)
        return f"cannot be reached: {user} may not enter {closed[0]}, which belongs to {owner}; {KEY_OR_OWN_HUB}"
    why = "is no socket" if error.errno == errno.ENOTSOCK else f"cannot be reached: {error.strerror}"
    return f"{why}; write the ipc address that `envhub serve` printed"
