"""What the kernel knows of a tcp connection: whose process its peer is, on this machine, and how much has come."""

from __future__ import annotations

import os
import socket
import struct

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_ALL = 0xFFFFFFFF  # any state, and no cookie
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI2s2s16s16sIII")  # struct inet_diag_req_v2
_OWNER = struct.Struct("=16x64xII")  # the user and the inode in a struct inet_diag_msg, after the header
_BYTES_RECEIVED = struct.Struct("=128xQ")  # of Linux's struct tcp_info


def copied(descriptor: int) -> socket.socket:
    """The connection of this descriptor, which libzmq owns and may close; the caller owns the copy.

    Raises:
        OSError: it has ended, and another file may have its number.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def is_others(descriptor: int) -> bool:
    """Whether this is a tcp connection of this machine whose peer is not, for certain, a process of this user."""
    try:
        connection = copied(descriptor)
    except OSError:
        return True
    with connection:
        return connection.family != socket.AF_UNIX and not _is_own(connection)


def _is_own(connection: socket.socket) -> bool:
    """Ask the kernel for the peer's end, whose peer is this end (sock_diag(7))."""
    try:
        ends = connection.getpeername(), connection.getsockname()
        ports = [end[1].to_bytes(2, "big") for end in ends]
        hosts = [socket.inet_pton(connection.family, end[0]) for end in ends]
        body = _REQUEST.pack(connection.family, socket.IPPROTO_TCP, 0, 0, _ALL, *ports, *hosts, 0, _ALL, _ALL)
        head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.send(head + body)
            answer = kernel.recv(4096)
    except OSError:  # it has ended, or the kernel does not tell
        return False
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return False
    user, inode = _OWNER.unpack_from(answer)
    return bool(user == os.getuid() and inode != 0)  # an end that its process has closed has no inode, and user 0


def kernel_tells() -> bool:
    """Whether ``is_others`` can know a connection of this user's from others'."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        with peer, server.accept()[0] as accepted:
            return not is_others(accepted.fileno())


def bytes_sent(descriptor: int) -> int | None:
    """The bytes that the peer of a tcp connection has sent so far; None where it is no tcp connection."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        return int(_BYTES_RECEIVED.unpack(tcp_info)[0])
    except (OSError, struct.error):
        return None
    finally:
        connection.detach()
