"""Grant with which a client drives: the arena and the bells, which come through the hub's side socket."""

from __future__ import annotations

import os
import socket

from envhub.arena.layout import Layout
from envhub.arena.memory import Arena
from envhub.protocol import messages, validation
from envhub.protocol.messages import Shared
from envhub.transport.fd_passing import DescriptorReader, above_stdio
from envhub_client.connection.local_sockets import LocalSockets
from envhub_client.deadline import Deadline

ATTACH_TIMEOUT_S = 5.0
HEAD_BYTES = 1 << 16  # of what comes before and with the first descriptors


class Attachment:
    """Everything that came through a hub's side socket.

    Attributes:
        side: the socket; the hub closes it when the client may no longer drive.
        shared: what the hub says of them.
    """

    shared: Shared

    def __init__(self) -> None:
        self.side = socket.socket(socket.AF_UNIX)
        self._reader = DescriptorReader(self.side)

    def open(self, sockets: LocalSockets | None, ticket: bytes) -> None:
        """Show the ticket to the hub that has these sockets, and receive what it gives.

        Raises:
            OSError: there is no side socket, it gives nothing in time, or its bells cannot be rung.
            codec.DecodeError: what it sent cannot be read, or a number of it is out of its bounds.
        """
        if sockets is None or not ticket:
            raise OSError("there is no side socket")
        deadline = Deadline(ATTACH_TIMEOUT_S)
        self.side.settimeout(ATTACH_TIMEOUT_S)
        sockets.connect_side(self.side)
        self.side.sendall(ticket)
        self.shared = messages.unpack(Shared, self._read()[4:])
        validation.check(self.shared, validation.REPLY_BOUNDS)
        while len(self._reader.descriptors) < 2 + self.shared.workers:
            self.side.settimeout(max(deadline.left_s(), 0.001))  # 0 would not wait, and fail, too
            self._read()
        self.side.setblocking(False)
        self._reader.descriptors[:] = map(above_stdio, self._reader.descriptors)
        for bell in self._reader.descriptors[1:]:
            os.set_blocking(bell, False)
            os.write(bell, bytes(8))  # wakes no worker, and fails where a ring would

    def _read(self) -> bytes:
        if not (data := self._reader.read(HEAD_BYTES)):
            raise OSError("the hub closed its side socket")
        if self._reader.truncated:
            raise OSError("this process may have no more descriptors")
        return data

    @property
    def bells(self) -> list[int]:
        """The eventfds of the client and of each worker, once the arena is mapped."""
        return self._reader.descriptors

    def arena(self, layout: Layout) -> Arena:
        """The memory, mapped; its descriptor is closed.

        Raises:
            OSError, ValueError: it is of another layout, as of another version of EnvHub, or cannot be mapped.
        """
        arena = Arena(layout, self._reader.descriptors[0], in_children=True)  # views of it may be read there
        arena.check()
        os.close(self._reader.descriptors.pop(0))
        return arena

    def close(self) -> None:
        """Close all of it; once more, should an interrupt have come in between."""
        self._reader.close()
        self.side.close()
