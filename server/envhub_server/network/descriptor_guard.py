"""A reserve of descriptors: the hub refuses new connections and sessions before it has no descriptor left.

A hub without descriptors cannot restart a worker, and libzmq (4.3.5) ends the process whose ipc listener cannot accept
a connection. So new connections are held back while some descriptors are left. libzmq drops a connection without a
handshake after ``transport.sockets.HANDSHAKE_MS``.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import socket
import struct
from collections.abc import Callable

from envhub_server.log import log

# The reserve is a fifth of the limit, and at least RESERVE_MIN (but never more than half of the limit): connections may
# come every 20 us while the hub is busy for milliseconds.
RESERVE, RESERVE_MIN = 0.2, 128
OPEN_AT = 0.85  # of the descriptors outside the reserve
CHECK_S = 0.25
# A worker that is being started has both ends of its channel, stdout and stderr, three of bells and a pidfd; once it
# runs, one end of the first three, and a trace. Its session has the memory, twice, two bells, the side socket and its
# client's pidfd, and one to spare.
PER_WORKER, PER_SESSION = 10, 7
PER_HUB, PER_ZYGOTE, PER_CLIENT = 30, 6, 2  # the first at least, with one address
LIMIT_ADVISED = 1024

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # of Linux; Python's socket module does not name them
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction of the kernel's packet filter: drop every packet


class DescriptorsShort(Exception):
    """A hub may open too few files to serve a client."""


class DescriptorGuard:
    """Lets new connections in while there are descriptors for them."""

    def __init__(self, shut: Callable[[], None], reopen: Callable[[], None]) -> None:
        self._shut_addresses, self._reopen = shut, reopen
        self._listening: list[socket.socket] = []
        self._shut = False
        self.check_s = math.inf  # when to call ``check`` next

    def listens(self, descriptor: int) -> None:
        self._listening.append(socket.socket(fileno=os.dup(descriptor)))

    def accepted(self, descriptor: int, now_s: float) -> None:
        """Shut the addresses if this descriptor of a new connection, the lowest that was free, is in the reserve."""
        if not self._shut and is_high(descriptor):
            self._shut = True
            self.check_s = now_s + CHECK_S
            self._shut_addresses()
            self._drop_packets(_SO_ATTACH_FILTER)
            note = f"new connections are refused; {_advice()}"
            # Event: Too few descriptors are left: new clients wait until there are more.
            log.error("descriptors_short", used=descriptor + 1, limit=limit(), note=note)

    def check(self, now_s: float) -> None:
        if now_s < self.check_s:
            return
        used = in_use()
        if used < OPEN_AT * given_max():
            self._shut = False
            self.check_s = math.inf
            self._drop_packets(_SO_DETACH_FILTER)
            self._reopen()
            # Event: Enough descriptors are left again: new clients are let in.
            log.warning("descriptors_back", used=used, limit=limit())
        else:
            self.check_s = now_s + CHECK_S

    def _drop_packets(self, option: int) -> None:
        """Drop packets that would begin a tcp connection, or drop them no more; their client goes on trying."""
        program = ctypes.create_string_buffer(_DROP_ALL)
        packet_filter = struct.pack("HP", 1, ctypes.addressof(program))  # the kernel copies the program
        for listener in self._listening:
            with contextlib.suppress(OSError):  # without such filters libzmq goes on trying to accept
                if listener.family != socket.AF_UNIX:
                    listener.setsockopt(socket.SOL_SOCKET, option, packet_filter)

    def close(self) -> None:
        for listener in self._listening:
            listener.close()
        self._listening.clear()


def shortage(workers: int) -> str:
    used, wanted, given = in_use(), PER_SESSION + PER_WORKER * workers, given_max()
    if used + wanted <= given:
        return ""
    return (
        f"{workers} workers take up to {wanted} descriptors, and {used} of the {given} that this hub gives away are in "
        f"use: close sessions, ask for fewer workers, or raise its limit of {limit()}: {_advice()}"
    )


def check_start(more: int) -> None:
    """Raise ``DescriptorsShort`` if a hub with ``more`` descriptors could not make a session of one worker."""
    used, wanted = in_use(), more + PER_CLIENT + PER_SESSION + PER_WORKER
    if used + wanted > given_max():
        raise DescriptorsShort(
            f"too few open files: the limit is {limit()}, {used} are in use, {limit() - given_max()} are kept in "
            f"reserve, and a hub with one env takes {wanted} more: {_advice()}"
        )


def _advice() -> str:
    return f"raise it by `ulimit -n {max(LIMIT_ADVISED, 2 * limit())}` before the start"


def workers_left() -> int:
    return max(0, (given_max() - in_use() - PER_SESSION) // PER_WORKER)


def is_high(descriptor: int) -> bool:
    """True if a new descriptor of this number is in the reserve; the system gives out the lowest free number."""
    return descriptor >= given_max()


def given_max() -> int:
    at_most = limit()
    return at_most - max(int(RESERVE * at_most), min(RESERVE_MIN, at_most // 2))


def in_use() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
    except OSError:  # there is none left to list them
        return limit()


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
