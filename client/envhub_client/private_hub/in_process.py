"""Messages to a hub in this process, which carries a request out while that is sent: for ``num_workers=0``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from envhub.in_process import in_process_hub
from envhub.protocol.client import ClientProtocol, Reply
from envhub.protocol.messages import Failure, World
from envhub_client.connection.local_sockets import LocalSockets

# Of the program's environment nothing is to be adopted, for the envs are in the program itself.
OWN_WORLD = World([], "", {})


class InProcessTransport:
    """A ``Transport`` to a hub for one session, without sockets."""

    address = "ipc:///proc/self/hub"  # for messages: nothing connects to it
    local_sockets: LocalSockets | None = None
    reconnects = False
    heard_ns = 0
    denied = ""
    descriptors = ()

    def __init__(self) -> None:
        self.closed = False
        self._hub: Any = None

    def open(self, protocol: ClientProtocol) -> None:
        """Make the hub."""
        self._protocol = protocol
        self._hub = in_process_hub()

    def send(self, frames: Sequence[Any]) -> None:
        """Have the hub carry the request out."""
        self._hub.receive([frame if isinstance(frame, bytes) else bytes(frame) for frame in frames])

    def hear(self, wait_s: float) -> Reply | None:
        """Take in what the hub has sent; an env's ``KeyboardInterrupt`` is raised, as it is one of the program."""
        outgoing = self._hub.protocol.outgoing
        while outgoing:
            _, (first, *frames) = outgoing.pop(0)
            # Those that are views of the arena are copied, since the envs write there again.
            own = [frame if type(frame) is bytes else memoryview(bytearray(frame)) for frame in frames]
            if (reply := self._protocol.receive([memoryview(first), *own], time.monotonic())) is not None:
                failure = reply.message
                if isinstance(failure, Failure) and failure.type.rpartition(".")[2] == "KeyboardInterrupt":
                    raise KeyboardInterrupt  # once: the reply is the protocol's ``answer`` from now on
                return reply
        return None

    def reconnect(self) -> None:
        """Do nothing: there is no way to the hub that could be lost."""

    def advice(self) -> str:
        """Advice where no hub answers."""
        return "it is in this process"

    def close(self) -> None:
        """End the hub."""
        if self._hub is not None:
            self._hub.close()
        self.closed = True
