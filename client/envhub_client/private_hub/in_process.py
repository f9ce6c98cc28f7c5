"""The connection to a hub in this process, which carries a request out while that is sent: for ``num_workers=0``."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from envhub.in_process import in_process_hub
from envhub.protocol.client import Reply
from envhub.protocol.messages import Failure, World
from envhub_client.connection.connection import Connection

ADDRESS = "ipc:///proc/self/hub"  # for messages: nothing is there
# Of the program's environment nothing is to be adopted, for the envs are in the program itself.
OWN_WORLD = World([], "", {})


class InProcessConnection(Connection):
    """A connection without sockets."""

    def __init__(self) -> None:
        """Make a hub for one session."""
        self._interrupted: Reply | None = None  # the reply that was told as an interrupt
        super().__init__(ADDRESS, secrets.token_bytes(16))

    def _open(self) -> None:
        self._hub = in_process_hub()

    def _send(self, frames: Sequence[Any]) -> None:
        self._hub.receive([frame if isinstance(frame, bytes) else bytes(frame) for frame in frames])

    def _hear(self, wait_s: float) -> Reply | None:
        outgoing = self._hub.protocol.outgoing
        while outgoing:
            _, (first, *frames) = outgoing.pop(0)
            # Those that are views of the arena are copied, since the envs write there again.
            own = [frame if type(frame) is bytes else memoryview(bytearray(frame)) for frame in frames]
            if (reply := self.protocol.receive([memoryview(first), *own], self.sent_ns / 1e9)) is not None:
                return reply
        return None

    def wait(self, timeout: float | None = None) -> Reply:
        """Close as any connection; re-raise an env's KeyboardInterrupt once."""
        reply = super().wait(timeout)
        failed = isinstance(reply.message, Failure) and reply.message.type.rpartition(".")[2] == "KeyboardInterrupt"
        if failed and reply is not self._interrupted:
            self._interrupted = reply
            raise KeyboardInterrupt
        return reply

    def _close_sockets(self) -> None:
        if hasattr(self, "_hub"):
            self._hub.close()
