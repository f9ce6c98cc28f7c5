"""A peer that speaks ZeroMQ's wire protocol by hand, and so can do what libzmq never would, such as not to read."""

from __future__ import annotations

import contextlib
import socket
import struct
from types import TracebackType

from envhub.protocol import messages
from envhub.protocol.messages import Hello, Op
from envhub.protocol.prelude import NO_SESSION, Prelude
from envhub.transport.address import parse

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


def command(name: bytes, body: bytes) -> bytes:
    """A short command frame."""
    content = bytes([len(name)]) + name + body
    return bytes([_COMMAND, len(content)]) + content


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def frame(body: bytes, more: bool) -> bytes:
    return struct.pack(">BQ", _LONG | (_MORE if more else 0), len(body)) + body


def connected(address: str, timeout_s: float = 10.0) -> socket.socket:
    """A connection to a hub, on which nothing has been said."""
    place = parse(address)
    if not place.is_ipc:
        return socket.create_connection((place.host, place.port), timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    connection.connect(place.path)
    return connection


class ZmtpPeer:
    """One connection, on which hello has been said.

    Attributes:
        connection: its socket; what is not received stays in it.
    """

    def __init__(self, address: str, routing_id: bytes = b"") -> None:
        self.connection = connected(address)
        self.connection.sendall(_GREETING)
        ready = _property(b"Socket-Type", b"DEALER") + (_property(b"Identity", routing_id) if routing_id else b"")
        self.connection.sendall(command(b"READY", ready))
        self._receive(len(_GREETING))
        self.receive()  # its READY
        self.hub_id = 0
        self.ask(Op.HELLO, messages.pack(Hello()))
        self.hub_id = Prelude.unpack(self.receive()).hub_id

    def ask(self, op: int, body: bytes, token: bytes = NO_SESSION, seq: int = 1, *frames: bytes) -> None:
        """Send a request; its reply is not waited for."""
        self.send([Prelude(op, self.hub_id, token, seq).pack() + body, *frames])

    def send(self, frames: list[bytes]) -> None:
        """Send a message, whatever it is."""
        last = len(frames) - 1
        self.connection.sendall(b"".join(frame(body, number < last) for number, body in enumerate(frames)))

    def receive(self) -> bytes:
        """The body of the next frame."""
        flags = self._receive(1)[0]
        length = struct.unpack(">Q", self._receive(8))[0] if flags & _LONG else self._receive(1)[0]
        return self._receive(length)

    def ends(self) -> bool:
        """Whether the hub ends the connection; what it said before is read away."""
        with contextlib.suppress(ConnectionResetError):
            while self.connection.recv(1 << 16):
                pass
        return True

    def _receive(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            chunk = self.connection.recv(count - len(found))
            if not chunk:
                raise ConnectionError("the hub has closed the connection")
            found += chunk
        return found

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> ZmtpPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
