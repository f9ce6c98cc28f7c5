"""The side socket of an ipc address: by it a client on this machine gets the descriptors of its session's memory.

Its path is that of the address with ``.side`` appended. A client must have the hub's user id, which the kernel reports,
and send the ticket that its session was given when it was made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections import OrderedDict, deque
from pathlib import Path

from envhub.transport.address import TICKET_BYTES, parse, side_path
from envhub_server.log import Logger
from envhub_server.loop import Poller
from envhub_server.network import descriptor_guard

PENDING_MAX = 64  # connections without a ticket so far; the oldest is closed for a new one
BACKLOG = 64

_UCRED = struct.Struct("3i")

log = Logger("envhub.hub")


class SideSocket:
    """The side sockets of one hub."""

    def __init__(self, poller: Poller, admitted: deque[tuple[bytes, socket.socket]]) -> None:
        """Append the ticket and connection of each client to ``admitted``; its reader owns the connection."""
        self._poller = poller
        self._admitted = admitted
        self._listeners: list[tuple[socket.socket, str]] = []
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._pending: OrderedDict[int, socket.socket] = OrderedDict()

    @property
    def open(self) -> bool:
        return bool(self._listeners)

    def listen(self, address: str) -> None:
        """Open the side socket of this address, if that is ipc; on failure its clients use the wire."""
        bound = parse(address)
        path = side_path(bound.path) if bound.is_ipc else None
        if path is None:
            return
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.setblocking(False)
            listener.bind(path)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            # Event: The side socket of an ipc address cannot be opened: clients step by messages.
            log.warning("side_socket_missing", path=path, why=str(error))
            return
        self._listeners.append((listener, path))
        self._poller.register(listener.fileno(), self)

    def on_ready(self, descriptor: int) -> None:
        if descriptor in self._pending:
            self._on_ticket(descriptor)
        else:
            self._on_connection(next(each for each, _ in self._listeners if each.fileno() == descriptor))

    def _on_connection(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:  # the client has gone, or there is no descriptor: the client uses the wire
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away(listener)
            return
        if descriptor_guard.is_high(connection.fileno()):
            connection.close()
            return
        connection.setblocking(False)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, _ = _UCRED.unpack(raw)
        if uid != os.getuid():
            # Event: A process of another user came to the side socket, and was refused.
            log.warning("side_socket_refused", once_per=("uid",), pid=pid, uid=uid)
            connection.close()
            return
        while len(self._pending) >= PENDING_MAX:
            self._drop(next(iter(self._pending)))
        descriptor = connection.fileno()
        self._pending[descriptor] = connection
        self._poller.register(descriptor, self)

    def _turn_away(self, listener: socket.socket) -> None:
        """Close a connection for which there is no descriptor, by freeing the spare one."""
        self._close_spare()
        with contextlib.suppress(OSError):
            listener.accept()[0].close()
        with contextlib.suppress(OSError):  # another connection took it
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _close_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _on_ticket(self, descriptor: int) -> None:
        connection = self._pending[descriptor]
        try:
            ticket = connection.recv(TICKET_BYTES)
        except OSError:
            ticket = b""
        if len(ticket) != TICKET_BYTES:
            self._drop(descriptor)
            return
        del self._pending[descriptor]
        self._poller.unregister(descriptor)
        self._admitted.append((ticket, connection))

    def _drop(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        self._pending.pop(descriptor).close()

    def close(self) -> None:
        for descriptor in list(self._pending):
            self._drop(descriptor)
        for listener, path in self._listeners:
            self._poller.unregister(listener.fileno())
            listener.close()
            Path(path).unlink(missing_ok=True)
        self._listeners.clear()
        self._close_spare()
