"""Facts of a tcp connection from the kernel: the user of its peer, on this machine, and the bytes that have come."""

from __future__ import annotations

import os
import socket
import struct

from envhub.transport.socket_file import socket_owner

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
    """True if this is a tcp connection of this machine whose peer is not, for certain, a process of this user."""
    try:
        connection = copied(descriptor)
    except OSError:
        return True
    with connection:
        return connection.family != socket.AF_UNIX and not _is_own(connection)


def _is_own(connection: socket.socket) -> bool:
    """True if the peer's end, whose peer is this end, is this user's."""
    try:
        ends = connection.getpeername()[:2], connection.getsockname()[:2]
    except OSError:  # it has ended
        return False
    user, inode = socket_owner(connection.family, *ends) or (-1, 0)
    return user == os.getuid() and inode != 0  # an end that its process has closed has no inode, and user 0


def kernel_tells() -> bool:
    """True if ``is_others`` can know a connection of this user's from others'."""
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
