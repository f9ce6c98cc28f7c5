"""The owner of a TCP socket of this machine, from the kernel (sock_diag(7))."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_ALL = 0xFFFFFFFF  # any state; no cookie
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI2s2s16s16sIII")  # struct inet_diag_req_v2
_OWNER = struct.Struct("=16x64xII")  # the user and the inode in a struct inet_diag_msg, after the header


def socket_owner(family: int, own: tuple[str, int], peer: tuple[str, int]) -> tuple[int, int] | None:
    """The user id and the inode of the socket with this own end and this peer, each an IP address and a port.

    If there is none, those of the socket that listens at ``own``. A socket that its process has closed has inode 0.

    Returns:
        None if there is no such socket, or the kernel does not answer.
    """
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
