"""Whose process is behind a tcp connection of this machine: the kernel's tables say so."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from pathlib import Path

TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
_LOCAL, _REMOTE, _UID = 1, 2, 7  # columns


LOCAL = -1  # in place of a user: of ipc, whose peers libzmq has checked
UNKNOWN = -2  # in place of a user: of another machine, or gone


def uid(descriptor: int) -> int:
    """The user of the process behind this connection, ``LOCAL`` or ``UNKNOWN``."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            family = copy.family
            if family not in TABLES:
                return LOCAL
            peer, own = copy.getpeername(), copy.getsockname()
        lines = TABLES[family].read_text().splitlines()[1:]
    except OSError:
        return UNKNOWN
    wanted = [_hexadecimal(peer[0], peer[1]), _hexadecimal(own[0], own[1])]
    for line in lines:
        columns = line.split()
        if columns[_LOCAL : _REMOTE + 1] == wanted:
            return int(columns[_UID])
    return UNKNOWN


def _hexadecimal(host: str, port: int) -> str:
    """An end of a connection as the kernel writes it: words of four bytes in the machine's order."""
    packed = ipaddress.ip_address(host.partition("%")[0]).packed
    words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return f"{b''.join(words).hex().upper()}:{port:04X}"
