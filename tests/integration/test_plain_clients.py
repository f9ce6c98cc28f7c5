"""A client that is a plain socket of libzmq: the session in bytes of PROTOCOL.md, and what a refused client sees."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from envhub_server.config import HubConfig
from envhub_server.network.connections import HELLO_S, MALFORMED_MAX
from hubs import ServedHub

from envhub.protocol import messages
from envhub.protocol.messages import Failure, Hello, Op
from envhub.protocol.prelude import FRAMES_MAX, NO_SESSION, PRELUDE, Prelude
from envhub.values import codec

ENDED_MS, QUIET_MS = 10_000, 300
UNKNOWN_OP = 99
SESSION = json.loads((Path(__file__).parents[1] / "conformance/golden.json").read_text())["session"]
EXAMPLE = codec.encode("Example-v0")


class PlainClient:
    """One connection, which is not made again once it has ended."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)

    def hello(self) -> int:
        """Say hello, and return the hub's id."""
        self.socket.send(Prelude(Op.HELLO, 0, NO_SESSION, 1).pack() + messages.pack(Hello()))
        assert self.socket.poll(ENDED_MS)
        return Prelude.unpack(self.socket.recv()).hub_id

    def codes(self) -> list[str]:
        """The codes of the failures that come until the hub is quiet."""
        found = []
        while self.socket.poll(QUIET_MS):
            found.append(messages.unpack(Failure, self.socket.recv()[PRELUDE.size :]).code)
        return found

    def has_ended(self, within_ms: int = ENDED_MS) -> bool:
        """True if the connection has ended, or ends within this time."""
        return bool(self._monitor.poll(within_ms))


@pytest.fixture
def client(hub: ServedHub) -> Iterator[PlainClient]:
    with zmq.Context() as context:
        yield PlainClient(context, hub.ipc)
        context.destroy(linger=0)


def test_session_in_bytes_runs_on_a_hub(client: PlainClient) -> None:
    hub_id = client.hello().to_bytes(8, "little")
    token = os.urandom(16)  # another test of this hub may have used the example's
    for op in ("MAKE", "RESET", "STEP", "CLOSE"):
        asked, golden = ([bytes.fromhex(frame) for frame in SESSION[f"{op} {kind}"]] for kind in ("request", "reply"))
        # Its env has the spaces of CartPole, and no hub offers it.
        first = (asked[0][:8] + hub_id + token + asked[0][32:]).replace(EXAMPLE, codec.encode("CartPole-v1"))
        client.socket.send_multipart([first, *asked[1:]])
        assert client.socket.poll(60_000)
        first, *frames = client.socket.recv_multipart()
        assert first[:8] == golden[0][:8] and first[8:32] == hub_id + token and first[32:40] == golden[0][32:40]
        assert [*map(len, frames)] == [*map(len, golden[1:3])]  # but the rows frame, as no env has an info


def test_another_major_version_is_refused_and_its_connection_stays(client: PlainClient) -> None:
    client.socket.send(Prelude(Op.LIST, client.hello(), NO_SESSION, 2, major=2).pack())
    assert client.codes() == ["unsupported_version"] and not client.has_ended(0)
    assert client.hello()


def test_last_of_some_malformed_messages_ends_its_connection(client: PlainClient) -> None:
    hub_id = client.hello()
    for number in range(MALFORMED_MAX - 1):
        client.socket.send(Prelude(UNKNOWN_OP, hub_id, NO_SESSION, number).pack())
        assert client.codes() == ["malformed"] and not client.has_ended(0)
    client.socket.send(Prelude(UNKNOWN_OP, hub_id, NO_SESSION, MALFORMED_MAX).pack())
    assert client.has_ended()


def test_messages_without_a_prelude_have_no_reply_and_end_their_connection_likewise(client: PlainClient) -> None:
    for _ in range(MALFORMED_MAX - 1):
        client.socket.send(b"GET / HTTP/1.1")
    assert client.codes() == [] and not client.has_ended(0)
    client.socket.send(b"GET / HTTP/1.1")
    assert client.has_ended()


def test_frame_that_is_too_long_ends_its_connection_without_a_reply(client: PlainClient) -> None:
    head = Prelude(Op.LIST, client.hello(), NO_SESSION, 2).pack()
    client.socket.send(head + bytes(HubConfig().message_bytes_max + 1 - len(head)))
    assert client.has_ended() and client.codes() == []


def test_message_of_too_many_frames_ends_its_connection_without_a_reply(client: PlainClient) -> None:
    head = Prelude(Op.LIST, client.hello(), NO_SESSION, 2).pack() + b"\x80"
    client.socket.send_multipart([head, *[b""] * FRAMES_MAX])
    assert client.has_ended() and client.codes() == []


@pytest.mark.long
def test_connection_without_a_message_ends_and_one_with_a_hello_stays(hub: ServedHub, client: PlainClient) -> None:
    with zmq.Context() as context:
        greeted = PlainClient(context, hub.ipc)
        greeted.hello()
        began_s = time.monotonic()
        assert client.has_ended(int(2000 * HELLO_S))
        assert time.monotonic() - began_s > HELLO_S - 1
        assert not greeted.has_ended(int(1000 * HELLO_S)) and greeted.hello()
        context.destroy(linger=0)
