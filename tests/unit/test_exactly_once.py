from __future__ import annotations

import pytest
from protocol_pair import (
    HUB_ID,
    SESSION_REQUESTS,
    TOKEN,
    Packet,
    ProtocolPair,
    joined,
    sent,
    step_on_its_way,
)

from envhub.protocol import messages, prelude
from envhub.protocol.messages import HeartbeatReply, Make, Op, Reset
from envhub.protocol.prelude import NO_SESSION, Prelude

REPLY = messages.REPLY


# --- exactly once -----------------------------------------------------------------------------------------------------


def test_idle_client_sends_no_heartbeats() -> None:
    pair = joined()
    pair.advance(100.0)
    assert pair.to_hub == []


@pytest.mark.parametrize(
    ("seq", "finished", "state"),
    [(2, True, "answered"), (2, False, "running"), (1, True, "answered"), (3, True, "unknown")],
)
def test_heartbeat_returns_the_state_of_the_request(seq: int, finished: bool, state: str) -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    if finished:
        pair.finish()
    pair.to_client.clear()
    head = Prelude(Op.HEARTBEAT, HUB_ID, TOKEN, seq).pack() + b"\x80"
    pair.to_hub.append(Packet(pair.peer, 1, [head]))
    pair.deliver_to_hub()
    reply = pair.to_client[0].frames[0]
    assert Prelude.unpack(reply) == Prelude(REPLY | Op.HEARTBEAT, HUB_ID, TOKEN, seq)
    assert messages.unpack(HeartbeatReply, reply[40:]).state == state


def test_heartbeat_about_an_unknown_session_is_answered_unknown() -> None:
    pair = ProtocolPair()
    pair.to_hub.append(Packet(pair.peer, 1, [Prelude(Op.HEARTBEAT, HUB_ID, TOKEN, 1).pack() + b"\x80"]))
    pair.deliver_to_hub()
    assert messages.unpack(HeartbeatReply, pair.to_client[0].frames[0][40:]).state == "unknown"


def test_heartbeat_of_another_client_is_told_nothing_and_takes_nothing() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    question = [Prelude(Op.HEARTBEAT, HUB_ID, TOKEN, 2).pack() + b"\x80"]
    for answered in (False, True):
        if answered:
            pair.finish()
            pair.disconnect()  # also not the lease
        pair.hub.outgoing.clear()
        assert pair.hub.receive(b"eve", 7, question, "eve") is None
        ((peer, frames),) = pair.hub.outgoing
        assert peer == b"eve" and messages.unpack(HeartbeatReply, bytes(frames[0])[40:]).state == "unknown"
        assert pair.hub.connection_of(TOKEN) == 1 and pair.hub.connections_of(TOKEN) <= {1}
        assert pair.hub.sessions_of(b"eve") == []
    assert TOKEN in pair.hub.leases and pair.hub.returned == []


# --- sequence numbers -------------------------------------------------------------------------------------------------


def test_close_that_cannot_be_read_lets_no_request_come_before_the_running_one_is_done() -> None:
    pair = joined()
    step_on_its_way(pair)
    running = pair.deliver_to_hub()
    assert running is not None
    assert sent(pair, Op.CLOSE, running.seq + 1, b"\xc1").code == "malformed"
    assert sent(pair, Op.RESET, running.seq + 2, messages.pack(Reset())).code == "bad_seq"
    pair.finish()
    reply = pair.deliver_to_client()
    assert reply is not None and reply.frames == [b"did left"]


def test_session_with_the_token_of_none_is_refused() -> None:
    pair = joined()
    assert sent(pair, Op.MAKE, 1, messages.pack(Make(1)), token=prelude.NO_SESSION).code == "malformed"


# --- requests that were given up --------------------------------------------------------------------------------------


def test_copy_of_the_last_but_one_given_up_request_delays_the_next_one_only() -> None:
    pair = joined()
    step_on_its_way(pair, b"first")
    late = pair.to_hub.pop()
    pair.client.give_up()
    step_on_its_way(pair, b"second")
    for _ in range(2):  # the client asks after the first, which the hub does not know, and then sends the second
        pair.advance(0)
        if pair.client.held:
            pair.settle()
    pair.client.give_up()
    pair.to_hub.insert(0, late)
    for _ in range(2):  # the first begins, so the second is refused, which the client learns of
        pair.deliver_to_hub()
    pair.deliver_to_client()
    step_on_its_way(pair, b"third")
    pair.deliver_to_hub()
    assert pair.deliver_to_client() is None  # the third is refused, too, and is sent again
    pair.settle()
    pair.advance(prelude.HEARTBEAT_S)
    pair.settle()
    assert pair.replies[-1].frames == [b"did third"]
    assert [bytes(request.frames[0]) for request in pair.carried_out if request.op is Op.STEP] == [b"first", b"third"]


def test_request_is_unsettled_from_before_it_is_sent_until_the_hub_says_that_it_has_ended() -> None:
    pair = joined()
    assert not pair.client.unsettled
    pair.client.request(Op.CALL, SESSION_REQUESTS[Op.CALL], [], pair.now_s)
    assert pair.client.unsettled  # an interrupt may come here, and nobody knows what was sent
    pair.client.give_up()
    assert pair.client.unsettled
    pair.request(Op.RESET, Reset())
    pair.client.give_up()  # nothing of it was sent
    assert pair.client.unsettled
    assert pair.step(b"left").frames == [b"did left"]
    assert not pair.client.unsettled


def test_ping_is_a_sign_of_life() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.now_s += 50.0
    assert "silent" in pair.client.trouble(pair.now_s)
    pair.client.receive([Prelude(Op.PING, HUB_ID, NO_SESSION, 0).pack()], pair.now_s)
    assert pair.client.trouble(pair.now_s) == ""


def test_second_request_while_one_is_pending_is_a_mistake_of_the_caller() -> None:
    pair = joined()
    step_on_its_way(pair)
    with pytest.raises(RuntimeError, match="STEP is pending"):
        pair.request(Op.RESET, Reset())
