"""TCP sockets of this machine: one that listens, and what the kernel knows of others."""

from __future__ import annotations

import errno
import socket
import struct
import sys

from envhub.transport.address import Address


def listening(wanted: Address, backlog: int) -> socket.socket:
    """A socket that listens at a tcp address, at one of IPv6 also for IPv4; raises ``OSError``."""
    host = {"localhost": "127.0.0.1", "*": "0.0.0.0"}.get(wanted.host, wanted.host.strip("[]"))
    family, both = (socket.AF_INET6, True) if wanted.is_ipv6 else (socket.AF_INET, False)
    return socket.create_server((host, wanted.port), family=family, backlog=backlog, dualstack_ipv6=both)


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
