"""What the kernel knows of a tcp connection: whose process its peer is, on this machine, and how much has come."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLES = Path("/proc/net/tcp"), Path("/proc/net/tcp6")
TRIES = 3  # a table that changes while it is read may lack a line
_LOCAL, _REMOTE, _STATE, _UID, _INODE = 1, 2, 3, 7, 9  # columns
_BYTES_RECEIVED = struct.Struct("=128xQ")  # of Linux's struct tcp_info
_OVER = {"06", "07", "0A"}  # TIME_WAIT, CLOSE and LISTEN: no bytes can come of these any more


class _End(NamedTuple):
    """A client's end of a connection to this machine: its port, the hub's port, and whose it is."""

    port: int
    hub_port: int
    is_own: bool


def is_others(descriptor: int) -> bool:
    """Whether this is a tcp connection of this machine whose peer is not, for certain, a process of this user."""
    try:
        with _socket(descriptor) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            ports = connection.getpeername()[1], connection.getsockname()[1]
    except OSError:  # it has ended
        return True
    for _ in range(TRIES):
        if found := [end.is_own for end in _ends() if (end.port, end.hub_port) == ports]:
            return not all(found)
    return True


def bytes_sent(descriptor: int) -> int | None:
    """The bytes that the peer of a tcp connection has sent so far; None where this is none."""
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


@contextlib.contextmanager
def _socket(descriptor: int) -> Iterator[socket.socket]:
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


def _ends() -> Iterator[_End]:
    for table in TABLES:
        with contextlib.suppress(FileNotFoundError):  # without IPv6
            for line in table.read_text().splitlines()[1:]:
                columns = line.split()
                if columns[_STATE] not in _OVER:
                    port, hub_port = (int(columns[each].rpartition(":")[2], 16) for each in (_LOCAL, _REMOTE))
                    # A socket that its process has closed has no inode, and user 0.
                    yield _End(port, hub_port, columns[_INODE] != "0" and int(columns[_UID]) == os.getuid())
