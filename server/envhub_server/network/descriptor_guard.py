"""How many descriptors the hub may still give away: connections and sessions are kept out before there are none left.

A hub without descriptors can start no worker in place of one that ended, and libzmq (4.3.5) ends the process whose ipc
listener cannot accept a connection. So new connections are held back while some are left; those that never become a
client's are dropped by libzmq after ``wire.HANDSHAKE_MS``.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import socket
import struct

import structlog

from envhub_server.network.listener import Listener

# What is kept: a fifth of the limit. Connections may come at 20 us each while the hub is busy for milliseconds, so not
# fewer than so many, where that is at most half of the limit.
RESERVE, RESERVE_MIN = 0.2, 128
OPEN_AT = 0.85  # of what may be given away
LOOK_S = 0.25
# Of a worker while it is started: its channel, its output and its error, with both ends, its bell and its pidfd. Of
# its session besides: a bell for each worker, the memory, twice, two bells, the side socket and its client's pidfd.
PER_WORKER, PER_SESSION = 9, 7

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # of Linux; Python's socket module does not name them
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction of the kernel's packet filter: keep nothing of it

log = structlog.get_logger("envhub.hub")


class DescriptorGuard:
    """Whether new connections and sessions are let in."""

    def __init__(self, binding: Listener) -> None:
        """Of the addresses of ``binding``; open."""
        self._binding = binding
        self._listeners: list[socket.socket] = []
        self._shut = False
        self.look_s = math.inf  # when ``look`` has something to do

    def listens(self, descriptor: int) -> None:
        """The ROUTER accepts connections on this descriptor."""
        self._listeners.append(socket.socket(fileno=os.dup(descriptor)))

    def accepted(self, descriptor: int, now_s: float) -> None:
        """There is a new connection of this descriptor, which is the lowest number that was free."""
        if not self._shut and is_high(descriptor):
            self._shut = True
            self.look_s = now_s + LOOK_S
            self._binding.shut()
            self._drop_packets(_SO_ATTACH_FILTER)
            log.error("descriptors_short", used=descriptor + 1, limit=limit(), note="nobody else is let in")

    def look(self, now_s: float) -> None:
        """Let clients in again once there are enough descriptors."""
        if now_s < self.look_s:
            return
        used = in_use()
        if used < OPEN_AT * given_max():
            self._shut = False
            self.look_s = math.inf
            self._drop_packets(_SO_DETACH_FILTER)
            self._binding.open()
            log.warning("descriptors_back", used=used, limit=limit())
        else:
            self.look_s = now_s + LOOK_S

    def end(self, descriptor: int) -> None:
        """End the connection of this descriptor, which its peer may do again.

        libzmq may have closed it, and the number may be something else's by now: only what came in by one of these
        addresses is ended, at worst another client's connection, which that makes again.
        """
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=descriptor)
            try:
                if _place(connection) in map(_place, self._listeners):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()

    def _drop_packets(self, option: int) -> None:
        """Begin, or cease, to drop what would begin a connection by tcp: its client goes on trying, as with a loss."""
        program = ctypes.create_string_buffer(_DROP_ALL)
        told = struct.pack("HP", 1, ctypes.addressof(program))  # of which the kernel makes a copy
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # without such filters libzmq goes on trying to accept
                if listener.family != socket.AF_UNIX:
                    listener.setsockopt(socket.SOL_SOCKET, option, told)

    def close(self) -> None:
        """Let go of the addresses."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()


def _place(end: socket.socket) -> tuple[int, object]:
    """By which address a connection came; its host may be one of several that the listener stands for."""
    name = end.getsockname()
    return end.family, name if end.family == socket.AF_UNIX else name[1]


def lack(workers: int) -> str:
    """Why a session with so many workers is not to be made; empty where there are descriptors enough."""
    used, wanted, given = in_use(), PER_SESSION + PER_WORKER * workers, given_max()
    if used + wanted <= given:
        return ""
    return (
        f"{workers} workers take up to {wanted} descriptors, and {used} of the {given} that this hub gives away are in "
        f"use: close sessions, ask for fewer workers, or raise its `ulimit -n` of {limit()}"
    )


def workers_left() -> int:
    """For how many workers of another session there are descriptors."""
    return max(0, (given_max() - in_use() - PER_SESSION) // PER_WORKER)


def is_high(descriptor: int) -> bool:
    """Whether this number says that few descriptors are left; the system gives out the lowest that is free."""
    return descriptor >= given_max()


def given_max() -> int:
    """How many descriptors are given away before the rest is kept."""
    at_most = limit()
    return at_most - max(int(RESERVE * at_most), min(RESERVE_MIN, at_most // 2))


def in_use() -> int:
    """How many descriptors this process has open."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the one that reads them
    except OSError:  # none is left for that
        return limit()


def limit() -> int:
    """How many it may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
