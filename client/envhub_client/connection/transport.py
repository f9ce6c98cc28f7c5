"""The seam between a connection and what carries its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from envhub.protocol.client import ClientProtocol, Reply
from envhub.protocol.prelude import Frame
from envhub_client.connection.local_sockets import LocalSockets


class Transport(Protocol):
    """Carries the messages of one connection, which opens it, uses it in one thread at a time, and closes it.

    It hands each message that arrives to the ``ClientProtocol`` that it was opened with, and reports there that the way
    to the hub was lost or found again. It knows nothing of requests.

    Attributes:
        address: of the hub, for messages.
        local_sockets: the hub's Unix sockets; None where it is reached otherwise, and before ``open``.
        reconnects: whether the way to the hub may be lost and found again, so that it must be kept up at all times.
        heard_ns: when the last message arrived, on the monotonic clock.
    """

    address: str
    local_sockets: LocalSockets | None
    reconnects: bool
    heard_ns: int

    @property
    def descriptors(self) -> Sequence[int]:
        """Descriptors of which one becomes readable when something may have arrived since the last ``hear``."""

    @property
    def denied(self) -> str:
        """The reason why the hub does not let this client in; empty as long as it may."""

    @property
    def closed(self) -> bool:
        """True if all of it is closed; after an interrupted ``close`` it is not."""

    def open(self, protocol: ClientProtocol) -> None:
        """Begin to connect, and report to this protocol; where it raises, ``close`` is still to be called.

        Raises:
            AddressError: the address cannot be connected to.
        """

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message. The frames must not change until its reply has come.

        A message that cannot be sent just now is dropped: the protocol asks after it, and has it sent again.
        """

    def hear(self, wait_s: float) -> Reply | None:
        """Take in what has arrived, or arrives within ``wait_s`` seconds.

        Returns:
            The reply to the pending request, if it is among it.

        Raises:
            RemoteProtocolError: a message does not follow PROTOCOL.md.
            LocalProtocolError: the connection was closed meanwhile.
            KeyboardInterrupt: one came in an env of this program's own process.
        """

    def reconnect(self) -> None:
        """Connect again before the next use, and drop what arrived and was not heard."""

    def advice(self) -> str:
        """Advice where no hub answers."""

    def close(self) -> None:
        """Close all of it; again, after an interrupt."""
