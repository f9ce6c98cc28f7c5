"""The file of a Unix socket, held open by a client that connects to it.

Another socket can be put at a path between a check and a connection, and before every reconnection. A descriptor of the
file stays the same file: Linux resolves ``/proc/self/fd/N`` to the file itself, even if its path is gone or names
another file. A connection to ``/proc/self/fd/N`` reaches the process that bound the socket, and is refused once that
process has closed it.

macOS cannot hold such a file open. There the socket is reached by its path, and must be in a folder in which, and above
which, no other user can replace it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import sys
from io import FileIO

from envhub.files import weakness_of
from envhub.transport.address import Address

NOWHERE = "/dev/null"  # a path that refuses every connection, as a socket without a listener does


class OtherUsersSocket(PermissionError):
    """The socket was made by another user. ``user``: the id of that user."""

    def __init__(self, path: str, user: int) -> None:
        super().__init__(errno.EPERM, f"is a socket of user {user}", path)
        self.user = user


class SocketAtPath:
    """The socket at a path, on a system that cannot hold its file open."""

    path: str
    inode: tuple[int, int]

    def __init__(self, path: str) -> None:
        status = os.lstat(path)
        if sys.platform == "win32" or not stat.S_ISSOCK(status.st_mode):
            raise OSError(errno.ENOTSOCK, "is no socket", path)
        if status.st_uid != os.getuid():
            raise OtherUsersSocket(path, status.st_uid)
        if (weakness := weakness_of(os.path.dirname(path))) is not None:
            raise OSError(errno.EPERM, f"another user could replace it, since {weakness}", path)
        self.path, self.inode = path, (status.st_dev, status.st_ino)

    def __enter__(self) -> SocketAtPath:
        return self

    def __exit__(self, *error: object) -> None: ...

    def close(self) -> None: ...


def open_socket_file(path: str) -> FileIO | SocketAtPath:
    """Raises ``OtherUsersSocket`` or ``OSError``."""
    if sys.platform != "linux":
        return SocketAtPath(path)
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError(errno.ENOTSOCK, "is no socket", path)
    # One call into C opens and stores it: an interrupt in between would leak the descriptor.
    (file,) = map(FileIO, map(os.open, (path,), (os.O_PATH | os.O_CLOEXEC,)))
    if (owner := os.fstat(file.fileno()).st_uid) != os.getuid():
        file.close()
        raise OtherUsersSocket(path, owner)
    return file


def listening(wanted: Address, backlog: int) -> socket.socket:
    """A socket that listens at a tcp address, at one of IPv6 also for IPv4; raises ``OSError``."""
    host = {"localhost": "127.0.0.1", "*": "0.0.0.0"}.get(wanted.host, wanted.host.strip("[]"))
    family, both = (socket.AF_INET6, True) if wanted.is_ipv6 else (socket.AF_INET, False)
    return socket.create_server((host, wanted.port), family=family, backlog=backlog, dualstack_ipv6=both)


def is_same(file: FileIO | SocketAtPath, other: FileIO | SocketAtPath) -> bool:
    if isinstance(file, SocketAtPath) or isinstance(other, SocketAtPath):
        return getattr(file, "inode", 0) == getattr(other, "inode", 1)
    return os.path.sameopenfile(file.fileno(), other.fileno())


def path_of(file: FileIO | SocketAtPath) -> str:
    if isinstance(file, SocketAtPath):
        return file.path
    return f"/proc/self/fd/{file.fileno()}"


_TCP_INFO = struct.Struct("=52xI72xQ")  # of Linux's struct tcp_info: when data came last, and the bytes that came


def tcp_facts(connection: socket.socket) -> tuple[float, int]:
    """The seconds since the peer sent data, and the bytes that it has sent, its end among them. Raises ``OSError``."""
    if sys.platform != "linux":
        raise OSError(errno.ENOPROTOOPT, "this system does not tell")
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        raise OSError(errno.ENOPROTOOPT, "this kernel does not tell")
    silent_ms, count = _TCP_INFO.unpack(info)
    return silent_ms / 1000, count


_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_ALL = 0xFFFFFFFF  # any state; no cookie
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI2s2s16s16sIII")  # struct inet_diag_req_v2
_OWNER = struct.Struct("=16x64xII")  # the user and the inode in a struct inet_diag_msg, after the header


def socket_owner(family: int, own: tuple[str, int], peer: tuple[str, int]) -> tuple[int, int] | None:
    """User id and inode (0 if closed) of the socket with these ends, or that listens at ``own``; None if unknown."""
    if sys.platform != "linux":
        return None
    try:
        ports = [port.to_bytes(2, "big") for _, port in (own, peer)]
        hosts = [socket.inet_pton(family, host) for host, _ in (own, peer)]
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL, *ports, *hosts, 0, _ALL, _ALL)
        head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.send(head + body)
            answer = kernel.recv(4096)
    except OSError:
        return None
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    user, inode = _OWNER.unpack_from(answer)
    return user, inode


def user_text(user: int) -> str:
    """A user of this machine for a message, such as ``user 1000 (alice)``."""
    if sys.platform != "win32":
        import pwd

        with contextlib.suppress(KeyError):
            return f"user {user} ({pwd.getpwuid(user).pw_name})"
    return f"user {user}"
