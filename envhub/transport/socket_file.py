"""The file of a Unix socket, held open by who connects to it.

A path can be given to another socket between a check and a connection, and again before every reconnection. A
descriptor of the file cannot: Linux resolves ``/proc/self/fd/N`` to the file itself, whatever has become of its path.
A connection to that place reaches the process that bound the socket, and is refused once that process has closed it.
The file need not have a path any more.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO

NOWHERE = "/dev/null"  # a place that refuses every connection, as a socket does at which nothing listens


class OtherUsersSocket(PermissionError):
    """A socket that another user has made.

    Attributes:
        user: the id of that user.
    """

    def __init__(self, path: str, user: int) -> None:
        super().__init__(errno.EPERM, f"is a socket of user {user}", path)
        self.user = user


def open_socket_file(path: str) -> FileIO:
    """Open the file of the socket at this path.

    Returns:
        A file that is good for ``place_of`` only. The caller owns it.

    Raises:
        OtherUsersSocket: another user has made it.
        OSError: there is none, or this user may not enter its folder.
    """
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError(errno.ENOTSOCK, "is no socket", path)
    # Opened and held by one call into C: an interrupt in between would leave a descriptor without an owner.
    (file,) = map(FileIO, map(os.open, (path,), (os.O_PATH | os.O_CLOEXEC,)))
    if (owner := os.fstat(file.fileno()).st_uid) != os.getuid():
        file.close()
        raise OtherUsersSocket(path, owner)
    return file


def place_of(file: FileIO) -> str:
    """The path by which this process connects to the socket, as long as the file is open."""
    return f"/proc/self/fd/{file.fileno()}"
