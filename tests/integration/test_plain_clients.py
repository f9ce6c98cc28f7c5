"""A client that is a plain socket of libzmq: the session in bytes of PROTOCOL.md, and what a refused client sees."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from envhub_server.config import HubConfig
from envhub_server.network.connections import HELLO_S, MALFORMED_MAX
from hubs import ServedHub

from envhub.protocol import messages
from envhub.protocol.messages import Failure, Hello, Op
from envhub.protocol.prelude import NO_SESSION, PRELUDE, Prelude
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

    def codes(self, least: int = 0) -> list[str]:
        """The codes of the failures that come until the hub is quiet: so many at least, for which it has its time."""
        found: list[str] = []
        while self.socket.poll(ENDED_MS if len(found) < least else QUIET_MS):
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


def test_last_of_some_malformed_messages_ends_its_connection(client: PlainClient) -> None:
    hub_id = client.hello()
    for number in range(MALFORMED_MAX - 1):
        client.socket.send(Prelude(UNKNOWN_OP, hub_id, NO_SESSION, number).pack())
        assert client.codes(1) == ["malformed"] and not client.has_ended(0)
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


@pytest.mark.long
def test_connection_without_a_message_ends_and_one_with_a_hello_stays(hub: ServedHub) -> None:
    with zmq.Context() as context:
        began_s = time.monotonic()  # before the hub can have seen the connection
        silent, greeted = PlainClient(context, hub.ipc), PlainClient(context, hub.ipc)
        greeted.hello()
        assert silent.has_ended(int(2000 * HELLO_S))
        assert time.monotonic() - began_s > HELLO_S - 1
        assert not greeted.has_ended(int(1000 * HELLO_S)) and greeted.hello()
        context.destroy(linger=0)


# --- statements of PROTOCOL.md about replies --------------------------------------------------------------------------


class Asking:
    """Requests of one session, in the bytes that a test gives."""

    def __init__(self, client: PlainClient) -> None:
        self.client, self.hub_id, self.token = client, client.hello(), os.urandom(16)

    def ask(self, op: Op, seq: int, header: bytes = b"\x80", *frames: bytes, hub_id: int | None = None) -> list[bytes]:
        """Return the frames of the reply."""
        prelude = Prelude(op, self.hub_id if hub_id is None else hub_id, self.token, seq)
        self.client.socket.send_multipart([prelude.pack() + header, *frames])
        assert self.client.socket.poll(60_000), op
        return list(self.client.socket.recv_multipart())

    def code(self, *asked: Any, **more: Any) -> str:
        """Return the code of the failure that the reply is; empty for another reply."""
        first, *_ = self.ask(*asked, **more)
        is_failure = Prelude.unpack(first).op == messages.REPLY | Op.FAILURE
        return messages.unpack(Failure, first[PRELUDE.size :]).code if is_failure else ""

    def state(self, seq: int) -> str:
        """Return what a HEARTBEAT about a request is answered."""
        return messages.unpack(messages.HeartbeatReply, self.ask(Op.HEARTBEAT, seq)[0][PRELUDE.size :]).state


@pytest.fixture
def asking(client: PlainClient) -> Asking:
    return Asking(client)


def made(name: str, **fields: Any) -> bytes:
    return codec.encode({"num_envs": 2, "name": name, **fields})


def test_limits_of_the_welcome_are_both(client: PlainClient) -> None:
    client.socket.send(Prelude(Op.HELLO, 0, NO_SESSION, 1).pack() + b"\x80")
    assert client.socket.poll(ENDED_MS)
    welcome = messages.unpack(messages.Welcome, client.socket.recv()[PRELUDE.size :])
    assert welcome.limits.keys() == {"envs_per_session_max", "message_bytes_max"}
    assert welcome.version == "1"


def test_seq_of_a_refused_request_is_not_used_up_and_a_closed_token_ends_with_its_seq(asking: Asking) -> None:
    assert asking.code(Op.RESET, 2) == asking.code(Op.CLOSE, 3) == "session_lost"
    assert asking.code(Op.MAKE, 3, made("CartPole-v1")) == "session_lost"  # CLOSE came with this seq
    assert asking.code(Op.MAKE, 4, made("CartPole-v1")) == ""
    assert asking.state(4) == "answered" and asking.state(5) == "unknown"
    assert asking.code(Op.MAKE, 5, made("CartPole-v1")) == asking.code(Op.RESET, 3) == "bad_seq"
    assert asking.code(Op.STEP, 5, b"\x04", bytes(16)) == "env_raised"  # there was no RESET
    assert asking.code(Op.STEP, 6, b"\x04", bytes(8)) == "bad_actions"
    assert asking.code(Op.RESET, 6) == "bad_actions"  # the reply to 6 again
    assert asking.ask(Op.RESET, 7) == asking.ask(Op.RESET, 7)
    assert asking.code(Op.CLOSE, 8) == asking.code(Op.CLOSE, 8) == "" and asking.state(8) == "unknown"


def test_header_is_read_in_any_order_with_short_floats_and_the_last_of_equal_keys(asking: Asking) -> None:
    header = b"\x84" + codec.encode("name") + codec.encode("CartPole-v1") + codec.encode("num_envs") + b"\x01"
    header += codec.encode("faults") + b"\x81" + codec.encode("step_s") + b"\xca" + struct.pack(">f", 2.5)
    first, *_ = asking.ask(Op.MAKE, 1, header + codec.encode("num_envs") + b"\x02")
    assert messages.unpack(messages.Made, first[PRELUDE.size :]).num_envs == 2
    assert asking.code(Op.RESET, 2, codec.encode({"seeds": [1.0, 2.0]})) == "malformed"  # a float where an int is due
    assert asking.code(Op.RESET, 3, codec.encode({"seeds": [1, 2], "later": [{}]})) == ""
    assert asking.code(Op.CLOSE, 4) == ""


@pytest.mark.parametrize("name", ["CartPole-v1", "graphs"])
def test_first_step_in_place_of_a_lost_session_is_a_reset(asking: Asking, name: str) -> None:
    first, *_ = asking.ask(Op.MAKE, 1, made(name, fresh=True))
    assert Prelude.unpack(first).op == messages.REPLY | Op.MAKE
    has_objects = name == "graphs"  # its action is a text and a number
    texts = messages.pack_rows((row, codec.encode(["a"])) for row in range(2))
    actions = (b"\x7f\x04", bytes(16), texts) if has_objects else (b"\x04", bytes(16))
    _, *frames = asking.ask(Op.STEP, 2, *actions)
    assert frames[0 if has_objects else 1] == bytes(20)  # reward 0, no flags
    assert has_objects or any(frames[0])
    assert asking.code(Op.CLOSE, 3) == ""
