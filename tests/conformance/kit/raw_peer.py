"""A client that sends any frames, for tests of a hub from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from envhub_client.connection import known_hubs
from envhub_client.connection.local_sockets import LocalSockets

from envhub.errors import HubTimeout
from envhub.protocol import messages
from envhub.protocol.messages import REPLY, Failure, Hello, Op
from envhub.protocol.prelude import FRAME_BYTES_MAX, NO_SESSION, PRELUDE, Prelude
from envhub.transport import address as addresses
from envhub.transport import sockets

ANSWER_TIMEOUT_S = 30.0


class RawAnswer(NamedTuple):
    """One message of the hub: its prelude, its header and the frames that follow."""

    prelude: Prelude
    body: bytes
    frames: list[bytes]

    @property
    def failure(self) -> Failure | None:
        return messages.unpack(Failure, self.body) if self.prelude.op == REPLY | Op.FAILURE else None


class RawPeer:
    """A DEALER that has said hello.

    Attributes:
        hub_id: what its requests carry.
    """

    def __init__(self, address: str, timeout: float = ANSWER_TIMEOUT_S) -> None:
        """Connect to an address, or the hub of a name, and say hello; errors as of ``envhub.connect``."""
        import zmq

        target = known_hubs.resolve(addresses.guarded(address))
        self._timeout = timeout
        self._local = LocalSockets(target.path) if target.is_ipc else None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.maxmsgsize = FRAME_BYTES_MAX
        sockets.choose_family(self._socket, target)
        if target.keys is not None:
            sockets.present_keys(self._socket, target.keys)
        self._socket.connect(target.text if self._local is None else f"ipc://{self._local.path()}")
        self.hub_id = 0
        try:
            self.hub_id = self.ask(Op.HELLO, messages.pack(Hello())).prelude.hub_id
        except BaseException:
            self.close()
            raise

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart(frames)

    def ask(self, op: int, body: bytes, token: bytes = NO_SESSION, seq: int = 1, *frames: bytes) -> RawAnswer:
        """Send a request with a prelude and wait for its reply; pushes and late replies are passed over."""
        self.send([Prelude(op, self.hub_id, token, seq).pack() + body, *frames])
        while True:
            answer = self.receive()
            if answer.prelude.op & REPLY and (answer.prelude.token, answer.prelude.seq) == (token, seq):
                return answer

    def receive(self) -> RawAnswer:
        """The next message; raises ``HubTimeout``."""
        if not self._socket.poll(int(self._timeout * 1000)):
            raise HubTimeout(f"the hub did not answer within {self._timeout:g} s")
        first, *frames = self._socket.recv_multipart()
        return RawAnswer(Prelude.unpack(first), first[PRELUDE.size :], frames)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        if self._local is not None:
            self._local.close()
