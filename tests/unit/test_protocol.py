from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from protocol_pair import (
    HUB_ID,
    SESSION_REQUESTS,
    TOKEN,
    Packet,
    ProtocolPair,
    failure_in,
    joined,
    sent,
    step_on_its_way,
)

from envhub.protocol import messages, prelude
from envhub.protocol.client import AWAY_WARNING_S, HEARTBEAT_S, ClientProtocol
from envhub.protocol.hub import CLOSED_EARLY_MAX, ENDED_MAX, SEQ_MAX, SHUTTING_DOWN, HubProtocol, Incoming
from envhub.protocol.messages import Close, Failure, HeartbeatReply, Hello, Make, Op, Reset, Step
from envhub.protocol.prelude import NO_SESSION, Prelude

REPLY = messages.REPLY


@pytest.mark.parametrize("frames", [[], [b""], [b"EHUB"], [bytes(40)], [b"GET / HTTP/1.1\r\n" * 4]])
def test_message_without_a_prelude_is_counted_and_not_answered(frames: list[bytes]) -> None:
    hub = HubProtocol(HUB_ID)
    assert hub.receive(b"peer", 1, frames) is None
    assert hub.outgoing == []
    assert hub.malformed == 1


# --- sessions that are not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed_early", [False, True])
def test_reply_of_an_ended_session_goes_to_its_own_client_alone(closed_early: bool) -> None:
    pair = ProtocolPair() if closed_early else joined()
    pair.hello()
    last = Prelude(Op.CLOSE, HUB_ID, TOKEN, 2).pack() + messages.pack(Close())
    incoming = pair.hub.receive(b"alice", 1, [last])
    if incoming is not None:
        pair.hub.answer(incoming, messages.Done())
        pair.hub.forget(TOKEN)
    pair.hub.outgoing.clear()
    for _ in range(2):
        assert pair.hub.receive(b"eve", 7, [last], "eve") is None
        ((peer, frames),) = pair.hub.outgoing
        assert peer == b"eve" and Prelude.unpack(frames[0]).op == REPLY | Op.FAILURE
        assert messages.unpack(Failure, bytes(frames[0])[40:]).code == "session_lost"
        pair.hub.outgoing.clear()
    assert pair.hub.receive(b"alice again", 8, [last]) is None
    assert Prelude.unpack(pair.hub.outgoing[0][1][0]).op == REPLY | (Op.FAILURE if closed_early else Op.CLOSE)


def test_reply_with_arrays_is_not_kept_once_the_session_has_ended() -> None:
    pair = joined()
    step_on_its_way(pair)
    step = pair.to_hub[0]
    pair.settle()
    pair.hub.forget(TOKEN)
    pair.to_hub.append(step)
    assert pair.deliver_to_hub() is None
    assert failure_in(pair.to_client[0]).code == "session_lost"


def test_only_the_last_ended_sessions_are_remembered() -> None:
    hub = HubProtocol(HUB_ID, sessions_max=1)
    hub.forget(TOKEN)  # which no session has had
    body = messages.pack(Make(1))
    for number in range(1, ENDED_MAX + 11):
        token = number.to_bytes(16, "big")
        assert hub.receive(b"peer", 1, [Prelude(Op.MAKE, HUB_ID, token, 1).pack() + body]) is not None
        hub.forget(token)
    oldest = (1).to_bytes(16, "big")
    first = hub.receive(b"peer", 1, [Prelude(Op.MAKE, HUB_ID, oldest, 1).pack() + body])
    assert first is not None  # so long ago that it is new again
    hub.forget(oldest)
    assert hub.receive(b"peer", 1, [Prelude(Op.MAKE, HUB_ID, token, 1).pack() + body]) is None


def refusal_of(hub: HubProtocol, op: Op, token: bytes, seq: int, message: Any) -> str:
    """The code of the failure that the hub answers a request with; empty where it carries the request out."""
    if hub.receive(b"peer", 1, [Prelude(op, HUB_ID, token, seq).pack() + messages.pack(message)]) is not None:
        return ""
    return messages.unpack(Failure, hub.outgoing.pop()[1][0][40:]).code


def test_only_the_last_closed_tokens_are_remembered_and_cost_no_ended_session_its_place() -> None:
    hub = HubProtocol(HUB_ID)
    assert refusal_of(hub, Op.MAKE, TOKEN, 1, Make(1)) == ""
    hub.forget(TOKEN)
    tokens = [number.to_bytes(16, "big") for number in range(1, CLOSED_EARLY_MAX + 2)]
    for token in tokens:
        assert refusal_of(hub, Op.CLOSE, token, 2, Close()) == "session_lost"
    assert refusal_of(hub, Op.MAKE, TOKEN, 1, Make(1)) == "session_lost"
    assert [refusal_of(hub, Op.MAKE, token, 1, Make(1)) for token in tokens[:2]] == ["", "session_lost"]


def test_late_answer_of_an_ended_session_is_not_taken_for_one_of_its_successor() -> None:
    pair = joined()
    step_on_its_way(pair)
    old = pair.deliver_to_hub()
    assert old is not None
    pair.hub.forget(TOKEN)
    pair.client.give_up()
    pair.request(Op.MAKE, Make(1))
    new = pair.deliver_to_hub()
    assert new is not None
    pair.hub.fail(old, Failure("session_lost", "session", "its lease ran out"))
    pair.collect()
    assert pair.deliver_to_client() is None  # the client dropped it
    pair.advance(HEARTBEAT_S)
    pair.deliver_to_hub()
    assert messages.unpack(HeartbeatReply, pair.to_client.pop().frames[0][40:]).state == "running"
    pair.running = new
    pair.finish()
    reply = pair.deliver_to_client()
    assert reply is not None and reply.op is Op.MAKE


def test_draining_hub_refuses_new_sessions_and_goes_on_with_old_ones() -> None:
    pair = joined()
    pair.hub.draining, pair.hub.stopping = SHUTTING_DOWN, True
    failure = sent(pair, Op.MAKE, 1, messages.pack(Make(1)), token=bytes(16 * [7]))
    assert (failure.code, failure.scope) == ("draining", "hub")
    assert pair.step(b"left").frames == [b"did left"]
    pair.hub.forget(TOKEN)
    assert sent(pair, Op.STEP, 9, b"left") == SHUTTING_DOWN


def test_malformed_make_leaves_no_session_behind() -> None:
    pair = ProtocolPair(sessions_max=1)
    pair.hello()
    pair.request(Op.MAKE, Make(1))
    pair.to_hub[0].frames[0] = pair.to_hub[0].frames[0][:40] + b"\xc1"
    pair.settle()
    assert pair.replies[-1].message.code == "malformed"
    assert pair.ask(Op.RESET, Reset()).message.code == "session_lost"
    assert pair.ask(Op.MAKE, Make(1)).message.num_envs == 2  # the one place is free


# --- hubs that ended --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.LIST, Op.HEALTH, Op.HEARTBEAT, Op.MAKE, Op.CLOSE])
def test_every_request_but_hello_is_refused_by_another_hub(op: Op) -> None:
    hub = HubProtocol(HUB_ID + 1)
    assert hub.receive(b"peer", 1, [Prelude(op, HUB_ID, TOKEN, 1).pack() + b"\x80"]) is None
    assert messages.unpack(Failure, bytes(hub.outgoing[0][1][0])[40:]).code == "stale_hub"
    assert hub.stale == [TOKEN]


def test_request_of_no_session_for_a_dead_hub_names_no_stale_session() -> None:
    hub = HubProtocol(HUB_ID + 1)
    assert hub.receive(b"peer", 1, [Prelude(Op.LIST, HUB_ID, prelude.NO_SESSION, 1).pack() + b"\x80"]) is None
    assert messages.unpack(Failure, bytes(hub.outgoing[0][1][0])[40:]).code == "stale_hub" and not list(hub.stale)
    assert hub.refused == 1


def test_session_expires_when_its_lease_has_run_out() -> None:
    pair = ProtocolPair(lease_s=60.0)
    pair.make()
    assert pair.hub.next_expiry_s() == math.inf
    pair.disconnect()
    assert TOKEN in pair.hub.leases
    assert pair.hub.next_expiry_s() == pair.now_s + 60.0
    assert pair.hub.expired(pair.now_s + 59.9) == []
    assert pair.hub.expired(pair.now_s + 60.0) == [TOKEN]


# --- when a hub is lost -----------------------------------------------------------------------------------------------


def test_hub_is_lost_when_connections_are_refused_for_five_seconds() -> None:
    client = joined().client
    client.refused(10.0)
    client.refused(14.9)
    assert client.loss(100.0) == ""  # nobody knows whether it would be refused now
    client.refused(15.0)
    assert "refused for 5 s" in client.loss(15.0)


@pytest.mark.parametrize("ends", [ClientProtocol.accepted, ClientProtocol.connected])
def test_refused_connections_are_forgotten_once_one_is_not(ends: Callable[[ClientProtocol], None]) -> None:
    client = joined().client
    client.refused(10.0)
    assert client.refused_s == 0
    ends(client)
    client.refused(20.0)
    client.refused(24.0)
    assert client.loss(24.0) == "" and client.refused_s == 4


def test_what_is_in_the_way_of_a_connection_is_told_until_there_is_one() -> None:
    pair = joined()
    pair.disconnect()
    pair.client.obstacle = "what is there says nothing"
    step_on_its_way(pair)
    assert pair.client.trouble(pair.now_s + 4) == "the connection to it is lost, and what is there says nothing"
    assert pair.client.loss(pair.now_s + 60.0).endswith("for reconnect_timeout=60 s: what is there says nothing")
    pair.client.connected()
    assert pair.client.obstacle == ""


def test_first_connection_that_is_refused_is_told_as_such() -> None:
    client = ClientProtocol(NO_SESSION, 30.0)
    client.request(Op.HELLO, Hello(client="test"), [], 1.0)
    assert "silent" in client.trouble(100.0)
    client.refused(2.0)
    assert client.trouble(100.0) == "connections to its address are refused"


def test_lost_connection_is_reported_within_four_seconds_also_without_a_pending_request() -> None:
    pair = joined()
    pair.disconnect()
    assert pair.client.trouble(pair.now_s + 0.2) == ""  # most are back by then
    assert pair.client.next_tick_s(pair.now_s) == pytest.approx(AWAY_WARNING_S)
    assert "lost" in pair.client.trouble(pair.now_s + AWAY_WARNING_S + 0.01)
    pair.reconnect()
    assert pair.client.trouble(pair.now_s + 9.0) == ""


def test_silent_hub_is_reported_within_four_seconds_of_a_pending_request() -> None:
    pair = joined()
    step_on_its_way(pair)
    waited_s = 0.0
    while not pair.client.trouble(pair.now_s):
        waits_s = max(pair.client.next_tick_s(pair.now_s), 0.001)
        waited_s += waits_s
        pair.advance(waits_s)
    assert 3.0 < waited_s < 4.0


def test_goodbye_says_why_the_session_is_lost() -> None:
    pair = joined()
    pair.hub.goodbye(TOKEN, Failure("draining", "hub", "the hub is shutting down"))
    pair.collect()
    assert pair.deliver_to_client() is None
    assert pair.client.loss(pair.now_s) == "the hub is shutting down"


# --- the step that a session waits for --------------------------------------------------------------------------------


def waiting_for_a_step() -> tuple[ProtocolPair, Packet]:
    """A session that has made a step, and the packet of its next one."""
    pair = joined()
    step_on_its_way(pair)
    pair.settle()
    step_on_its_way(pair, b"right")
    return pair, pair.to_hub[0]


def test_step_like_the_last_one_is_known_by_its_first_frame_and_taken_once() -> None:
    pair, step = waiting_for_a_step()
    first, *others = step.frames
    taken = pair.hub.receive_step(step.peer, first, others)
    assert taken == Incoming(step.peer, Op.STEP, TOKEN, 3, Step(b"\x04"), [b"right"])
    assert pair.hub.receive_step(step.peer, first, others) is None
    assert pair.hub.receive(step.peer, step.connection, step.frames) is None, "it runs, and its reply goes to who asks"
    pair.hub.answer(taken, messages.Done(), [b"arrays"])
    assert pair.hub.outgoing.pop()[1] == [Prelude(REPLY | Op.STEP, HUB_ID, TOKEN, 3).pack(), b"arrays"]
    assert pair.hub.receive(step.peer, step.connection, step.frames) is None
    assert pair.hub.outgoing.pop()[1][1:] == [b"arrays"], "a late copy is answered as before"
    assert pair.hub.replayed == 2


def test_step_from_elsewhere_or_of_a_client_that_was_gone_is_left_to_receive() -> None:
    pair, step = waiting_for_a_step()
    first, *others = step.frames
    assert pair.hub.receive_step(b"another peer", first, others) is None
    pair.hub.connection_lost(TOKEN, pair.now_s)
    assert pair.hub.receive_step(step.peer, first, others) is None
    assert pair.hub.receive(step.peer, step.connection, step.frames) is not None
    assert pair.hub.returned == [TOKEN] and TOKEN not in pair.hub.leases


def test_step_on_a_connection_that_may_have_ended_is_left_to_receive() -> None:
    pair, step = waiting_for_a_step()
    first, *others = step.frames
    assert pair.hub.connection_ended(pair.connection) == [(TOKEN, step.peer)]
    assert pair.hub.link_of(TOKEN).connection == pair.connection, (
        "it may be a new one of the same name, to be looked after"
    )
    assert pair.hub.receive_step(step.peer, first, others) is None
    assert pair.hub.receive(step.peer, 7, step.frames) is not None and pair.hub.link_of(TOKEN).connection == 7


@pytest.mark.parametrize("op", [Op.RESET, Op.CLOSE])
def test_step_that_something_else_came_before_is_none_that_the_session_waits_for(op: Op) -> None:
    pair, step = waiting_for_a_step()
    first, *others = step.frames
    pair.to_hub.clear()
    pair.client.give_up()
    head = Prelude(op, HUB_ID, TOKEN, 3).pack() + messages.pack(Reset() if op is Op.RESET else Close())
    pair.to_hub.append(Packet(pair.peer, pair.connection, [head]))
    pair.settle()
    assert pair.hub.receive_step(step.peer, first, others) is None


def test_step_that_failed_is_not_remembered_and_the_last_number_has_no_next() -> None:
    pair, step = waiting_for_a_step()
    taken = pair.hub.receive_step(step.peer, step.frames[0], step.frames[1:])
    assert taken is not None
    pair.hub.fail(taken, Failure("bad_actions", "request", "too short"))
    after = Prelude(Op.STEP, HUB_ID, TOKEN, 4).pack() + b"\x04"
    assert pair.hub.receive_step(step.peer, after, [b"left"]) is None
    last = Prelude(Op.STEP, HUB_ID, TOKEN, SEQ_MAX).pack() + b"\x04"
    taken = pair.hub.receive(step.peer, step.connection, [last, b"left"])
    assert taken is not None
    pair.hub.answer(taken, messages.Done())
    assert len(pair.hub.outgoing) == 2


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
        assert pair.hub.link_of(TOKEN).connection == 1 and pair.hub.link_of(TOKEN).connections <= {1}
        assert pair.hub.sessions_of(b"eve") == []
    assert TOKEN in pair.hub.leases and pair.hub.returned == []


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


# --- requests that were given up --------------------------------------------------------------------------------------


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


def test_second_request_while_one_is_pending_is_a_mistake_of_the_caller() -> None:
    pair = joined()
    step_on_its_way(pair)
    with pytest.raises(RuntimeError, match="STEP is pending"):
        pair.request(Op.RESET, Reset())
