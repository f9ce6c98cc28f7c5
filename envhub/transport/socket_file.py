"""The file of a Unix socket, held open by a client that connects to it.

Another socket can be put at a path between a check and a connection, and before every reconnection. A descriptor of the
file stays the same file: Linux resolves ``/proc/self/fd/N`` to the file itself, even if its path is gone or names
another file. A connection to ``/proc/self/fd/N`` reaches the process that bound the socket, and is refused once that
process has closed it.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from io import FileIO

NOWHERE = "/dev/null"  # a path that refuses every connection, as a socket without a listener does


class OtherUsersSocket(PermissionError):
    """The socket was made by another user.

    Attributes:
        user: the id of that user.
    """

    def __init__(self, path: str, user: int) -> None:
        super().__init__(errno.EPERM, f"is a socket of user {user}", path)
        self.user = user


def open_socket_file(path: str) -> FileIO:
    """Open the file of the socket at this path.

    Returns:
        A file for ``place_of`` only. The caller owns it.

    Raises:
        OtherUsersSocket: another user made it.
        OSError: there is no socket, or this user may not enter its folder.
    """
    if sys.platform != "linux" or not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError(errno.ENOTSOCK, "is no socket", path)
    # One call into C opens and stores it: an interrupt in between would leak the descriptor.
    (file,) = map(FileIO, map(os.open, (path,), (os.O_PATH | os.O_CLOEXEC,)))
    if (owner := os.fstat(file.fileno()).st_uid) != os.getuid():
        file.close()
        raise OtherUsersSocket(path, owner)
    return file


def place_of(file: FileIO) -> str:
    """The path at which this process connects to the socket while the file is open."""
    return f"/proc/self/fd/{file.fileno()}"
