"""The Unix sockets of a hub on this machine, and the proof of who is behind them: only what this user bound is reached.

A connection is made to the file of a socket, held open from the check of its owner on: libzmq reaches the same process
again or none. On macOS, which has no such descriptor, it is made to the path, in a folder that is the user's alone.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from envhub.errors import AddressError
from envhub.transport.address import side_path
from envhub.transport.socket_file import (
    NOWHERE,
    OtherUsersSocket,
    SocketAtPath,
    is_same,
    open_socket_file,
    path_of,
    user_text,
)

PROBE_S = 0.2
if sys.platform == "win32":
    _FAMILY = socket.AF_UNSPEC  # Python has no Unix sockets there, and ipc addresses are refused
else:
    _FAMILY = socket.AF_UNIX
# For who meets the hub of another user.
KEY_OR_OWN_HUB = (
    "ask that user for a key (`envhub keys add`, `envhub serve --keys`), or start a hub of your own by `envhub serve`"
)


class OwnHub(NamedTuple):
    """This program's own hub, by descriptors: of its process, and of the files of its socket and its side socket."""

    pidfd: int
    socket: int
    side: int


class LocalSockets:
    """The socket and the side socket of a hub: those at an ipc address, or of ``own``, which keeps its descriptors."""

    def __init__(self, path: str, own: OwnHub | None = None) -> None:
        self._path = path
        self._own = None if own is None else (FileIO(os.dup(own.socket)), FileIO(os.dup(own.side)))
        self._file: FileIO | SocketAtPath | None = None if self._own is None else self._own[0]
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
        return NOWHERE if self._file is None else path_of(self._file)

    def has_moved(self) -> bool:
        """True if the path means another socket than the last ``path``, as of a hub that was started again."""
        file = None if self._own is not None else self._opened()
        if file is None:
            return False
        with file:
            return self._file is None or not is_same(file, self._file)

    def refuses(self) -> bool:
        if self._file is None:
            return True
        with socket.socket(_FAMILY) as probe:
            probe.settimeout(PROBE_S)
            try:
                probe.connect(path_of(self._file))
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
            side.connect(path_of(self._own[1]))
            return
        if (path := side_path(self._path)) is None:
            raise OSError(f"{self._path} is too long for a side socket")
        with open_socket_file(path) as file:
            side.connect(path_of(file))

    def _opened(self) -> FileIO | SocketAtPath | None:
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
