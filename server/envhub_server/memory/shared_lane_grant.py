"""The shared lane: the descriptors by which a client steps in the session's memory without the hub."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence

from envhub.arena.memory import Arena
from envhub.protocol import messages
from envhub.transport.descriptors import DESCRIPTORS_MAX
from envhub_server.loop.poller import Poller, Source

SO_PEERPIDFD = 77  # of Linux 6.5; Python's socket module does not name it


_UCRED = struct.Struct("iII")  # the process, user and group of a peer


def process_of(side: socket.socket) -> int:
    """The process id of the client behind this socket; 0 if it is in another container."""
    return int(_UCRED.unpack(side.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0])


class SharedLaneGrant:
    """The shared lane of one session; the session's state machine decides when the client has it."""

    def __init__(self, poller: Poller) -> None:
        """Have no client at first."""
        self._poller = poller
        self._side: socket.socket | None = None  # of the client, while it may drive
        self._client = -1  # a pidfd of its process, since a forked child may hold its end of the socket

    def has(self, descriptor: int) -> bool:
        """True if this descriptor is the one that is ready when the client has gone."""
        return descriptor == self._client or (self._side is not None and descriptor == self._side.fileno())

    def share(self, side: socket.socket, shared: messages.Shared, descriptors: Sequence[int], source: Source) -> bool:
        """Send the client behind this socket all that it needs to drive; False if it has gone or does not read.

        ``source`` is called when the client has left its side socket. It is not kept here, since it holds this grant:
        a session that has ended must go at once, and an idle hub collects no cycles.
        """
        self._side = side
        body = messages.pack(shared)
        try:
            for start in range(0, len(descriptors), DESCRIPTORS_MAX):
                head = len(body).to_bytes(4, "little") + body if start == 0 else b"\0"
                socket.send_fds(side, [head], descriptors[start : start + DESCRIPTORS_MAX])
        except OSError:
            return False
        self._poller.register(side.fileno(), source)
        with contextlib.suppress(OSError):  # an older kernel
            self._client = side.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
            os.set_inheritable(self._client, False)
            self._poller.register(self._client, source)
        return True

    def revoke(self, arena: Arena) -> None:
        """Make a client that waits for a step, or is about to drive one, ask the hub for the state of its session."""
        if self._side is not None:
            arena.revoke()
            with contextlib.suppress(OSError):  # it has gone
                self._side.shutdown(socket.SHUT_RDWR)  # which wakes it

    def close(self) -> None:
        """End the grant, and free its descriptors."""
        if self._side is not None:
            self._poller.unregister(self._side.fileno())
            self._side.close()
            self._side = None
        if self._client >= 0:
            self._poller.unregister(self._client)
            os.close(self._client)
            self._client = -1
