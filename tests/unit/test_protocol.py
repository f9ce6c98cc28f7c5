from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from protocol_pair import (
    HUB_ID,
    TOKEN,
    Packet,
    ProtocolPair,
    failure_in,
    joined,
    sent,
    step_on_its_way,
)

from envhub.errors import RemoteProtocolError
from envhub.protocol import messages, prelude
from envhub.protocol.client import ClientProtocol
from envhub.protocol.hub import SHUTTING_DOWN, HubProtocol, Incoming
from envhub.protocol.messages import Attach, Close, Failure, HeartbeatReply, Hello, Make, Op, Reset, Step
from envhub.protocol.prelude import NO_SESSION, Prelude

REPLY = messages.REPLY


# --- the prelude ------------------------------------------------------------------------------------------------------


def test_prelude_is_forty_bytes_in_the_order_of_the_specification() -> None:
    packed = Prelude(Op.STEP, 0x1122334455667788, TOKEN, 9).pack()
    assert len(packed) == 40
    assert packed[:8] == b"EHUB\x01\x00\x12\x00"
    assert struct.unpack("<Q", packed[8:16]) == (0x1122334455667788,)
    assert packed[16:32] == TOKEN
    assert struct.unpack("<Q", packed[32:]) == (9,)
    assert Prelude.unpack(packed) == Prelude(Op.STEP, 0x1122334455667788, TOKEN, 9)


@pytest.mark.parametrize("frames", [[], [b""], [b"EHUB"], [bytes(40)], [b"GET / HTTP/1.1\r\n" * 4]])
def test_message_without_a_prelude_is_counted_and_not_answered(frames: list[bytes]) -> None:
    hub = HubProtocol(HUB_ID)
    assert hub.receive(b"peer", 1, frames) is None
    assert hub.outgoing == []
    assert hub.malformed == 1


@pytest.mark.parametrize("frames", [[], [b"EHUB"], [bytes(40)]])
def test_client_raises_for_a_message_without_a_prelude(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        ClientProtocol().receive(frames, 0.0)


# --- versions and hello -----------------------------------------------------------------------------------------------


def test_client_knows_that_the_hub_may_have_a_session_once_one_was_asked_for() -> None:
    pair = ProtocolPair()
    pair.hello()
    assert not pair.client.may_have_session
    pair.client.request(Op.MAKE, Make("CartPole-v1", 1), [], pair.now_s)
    pair.client.give_up()
    assert pair.client.may_have_session


def test_request_of_another_version_is_refused_and_both_versions_are_named() -> None:
    pair = ProtocolPair()
    head = Prelude(Op.HELLO, 0, NO_SESSION, 1, version=2).pack() + messages.pack(Hello())
    pair.to_hub.append(Packet(pair.peer, 1, [head]))
    assert pair.deliver_to_hub() is None
    failure = failure_in(pair.to_client[0])
    assert (failure.code, failure.scope) == ("unsupported_version", "hub")
    assert "protocol 1, the client 2" in failure.message


def test_refused_version_reaches_the_client_as_the_reply_to_its_hello() -> None:
    pair = ProtocolPair()
    pair.request(Op.HELLO, Hello())
    hello = pair.to_hub.pop()
    pair.to_hub.append(Packet(hello.peer, 1, [hello.frames[0][:4] + b"\x02" + hello.frames[0][5:]]))
    pair.settle()
    assert pair.replies[0].message.code == "unsupported_version"
    assert pair.client.hub_id == 0


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


def test_lost_failure_of_a_make_is_sent_again_without_making_again() -> None:
    pair = ProtocolPair()
    pair.hello()
    pair.request(Op.MAKE, Make(2, "Nothing-v0"))
    make = pair.to_hub[0]
    request = pair.deliver_to_hub()
    assert request is not None
    pair.hub.fail(request, Failure("unknown_env", "request", "no such env"))
    pair.hub.forget(TOKEN)
    pair.hub.outgoing.clear()
    pair.to_hub.append(make)
    assert pair.deliver_to_hub() is None
    assert failure_in(pair.to_client[0]).code == "unknown_env"


def test_token_of_a_failed_make_can_be_used_for_another_make() -> None:
    pair = ProtocolPair()
    pair.hello()
    pair.request(Op.MAKE, Make(2, "Nothing-v0"))
    request = pair.deliver_to_hub()
    pair.running = None
    assert request is not None
    pair.hub.fail(request, Failure("unknown_env", "request", "no such env"))
    pair.hub.forget(TOKEN)
    pair.collect()
    pair.deliver_to_client()
    assert pair.ask(Op.MAKE, Make(2, "CartPole-v1")).message.num_envs == 2


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
    body = messages.pack(Make(1))
    for number in range(1, prelude.ENDED_MAX + 11):
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


@pytest.mark.parametrize(("op", "message"), [(Op.MAKE, Make(1)), (Op.ATTACH, Attach(bytes(16)))])
def test_close_that_overtakes_the_first_request_of_its_session_has_that_refused(op: Op, message: Any) -> None:
    hub = HubProtocol(HUB_ID)
    assert refusal_of(hub, Op.CLOSE, TOKEN, 2, Close()) == "session_lost"
    assert refusal_of(hub, op, TOKEN, 1, message) == "session_lost"
    assert refusal_of(hub, op, TOKEN, 1, message) == "session_lost"  # as often as it comes
    assert refusal_of(hub, op, TOKEN[::-1], 1, message) == ""


def test_only_the_last_closed_tokens_are_remembered_and_cost_no_ended_session_its_place() -> None:
    hub = HubProtocol(HUB_ID)
    assert refusal_of(hub, Op.MAKE, TOKEN, 1, Make(1)) == ""
    hub.forget(TOKEN)
    tokens = [number.to_bytes(16, "big") for number in range(1, prelude.CLOSED_EARLY_MAX + 2)]
    for token in tokens:
        assert refusal_of(hub, Op.CLOSE, token, 2, Close()) == "session_lost"
    assert refusal_of(hub, Op.MAKE, TOKEN, 1, Make(1)) == "session_lost"
    assert [refusal_of(hub, Op.MAKE, token, 1, Make(1)) for token in tokens[:2]] == ["", "session_lost"]


def test_failure_for_a_session_that_is_forgotten_still_reaches_its_client() -> None:
    pair = joined()
    step_on_its_way(pair)
    request = pair.deliver_to_hub()
    assert request is not None
    pair.hub.forget(TOKEN)
    pair.hub.fail(request, Failure("session_lost", "session", "its lease ran out"))
    pair.collect()
    reply = pair.deliver_to_client()
    assert reply is not None and reply.message.code == "session_lost"


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
    pair.advance(prelude.HEARTBEAT_S)
    pair.deliver_to_hub()
    assert messages.unpack(HeartbeatReply, pair.to_client.pop().frames[0][40:]).state == "running"
    pair.running = new
    pair.finish()
    reply = pair.deliver_to_client()
    assert reply is not None and reply.op is Op.MAKE


# --- limits and draining ----------------------------------------------------------------------------------------------


def test_make_beyond_the_session_limit_is_refused_until_a_session_ends() -> None:
    pair = ProtocolPair(sessions_max=1)
    pair.make()
    other = bytes(16 * [7])
    failure = sent(pair, Op.MAKE, 1, messages.pack(Make(1)), token=other)
    assert (failure.code, failure.scope) == ("limit", "hub")
    assert "sessions_max=1" in failure.message
    pair.hub.forget(TOKEN)
    head = Prelude(Op.MAKE, HUB_ID, other, 1).pack() + messages.pack(Make(1))
    assert pair.hub.receive(b"other", 2, [head]) is not None


def test_draining_hub_refuses_new_sessions_and_goes_on_with_old_ones() -> None:
    pair = joined()
    pair.hub.draining = True
    failure = sent(pair, Op.MAKE, 1, messages.pack(Make(1)), token=bytes(16 * [7]))
    assert (failure.code, failure.scope) == ("draining", "hub")
    assert pair.step(b"left").frames == [b"did left"]
    pair.hub.forget(TOKEN)
    assert sent(pair, Op.STEP, 9, b"left") == SHUTTING_DOWN


# --- malformed requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [0, 7, 63, Op.PING, Op.FAILURE, REPLY | Op.STEP, REPLY | Op.FAILURE, 255])
def test_request_with_an_unknown_op_is_refused(op: int) -> None:
    pair = joined()
    failure = sent(pair, op, 2)
    assert (failure.code, failure.scope) == ("malformed", "request")
    assert pair.hub.malformed == 1


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x90", b"\x81\xa5seeds\x01", b"\x80" * 100])
def test_malformed_header_is_answered_and_the_session_goes_on(body: bytes) -> None:
    pair = joined()
    pair.request(Op.RESET, Reset())
    pair.to_hub[0].frames[0] = pair.to_hub[0].frames[0][:40] + body
    assert pair.deliver_to_hub() is None
    reply = pair.deliver_to_client()
    assert reply is not None and reply.message.code == "malformed"
    assert pair.hub.malformed == 1
    assert pair.step(b"left").frames == [b"did left"]


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


# --- what is no reply -------------------------------------------------------------------------------------------------


# --- leases -----------------------------------------------------------------------------------------------------------


def test_session_expires_when_its_lease_has_run_out() -> None:
    pair = ProtocolPair(lease_s=60.0)
    pair.make()
    assert pair.hub.next_expiry_s() == math.inf
    pair.disconnect()
    assert TOKEN in pair.hub.leases
    assert pair.hub.next_expiry_s() == pair.now_s + 60.0
    assert pair.hub.expired(pair.now_s + 59.9) == []
    assert pair.hub.expired(pair.now_s + 60.0) == [TOKEN]


def test_connected_session_never_expires() -> None:
    pair = joined()
    assert pair.hub.expired(pair.now_s + 1e9) == []
    assert TOKEN not in pair.hub.leases


def test_client_is_said_to_have_returned_once_and_only_if_its_lease_ran() -> None:
    pair = joined()
    assert pair.hub.returned == []
    step_on_its_way(pair)
    pair.disconnect()
    pair.reconnect()
    pair.advance(0)
    pair.settle()
    assert pair.hub.returned == [TOKEN]
    assert pair.hub.leases == {}


def test_end_of_an_old_connection_does_not_concern_a_client_that_moved() -> None:
    pair = joined()
    pair.reconnect()
    pair.step(b"left")
    assert pair.hub.connection_ended(1) == []


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


def test_request_after_a_long_absence_has_all_of_the_reconnect_timeout() -> None:
    pair = joined()
    pair.disconnect()
    pair.advance(100.0)
    step_on_its_way(pair)
    assert pair.client.loss(pair.now_s + 59.9) == ""
    assert "reconnect_timeout=60" in pair.client.loss(pair.now_s + 60.0)


def test_hub_that_is_connected_but_silent_is_lost_after_the_reconnect_timeout() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    pair.advance(30.0)  # its question is not answered
    assert pair.client.loss(pair.now_s) == ""
    assert "reconnect_timeout" in pair.client.loss(pair.now_s + 30.0)


def test_hub_that_answers_heartbeats_is_not_lost_however_long_a_step_takes() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    for _ in range(1000):
        pair.advance(prelude.HEARTBEAT_S)
        pair.deliver_to_hub()
        pair.deliver_to_client()
        assert pair.client.loss(pair.now_s) == pair.client.trouble(pair.now_s) == ""
    pair.settle()
    assert pair.replies[-1].frames == [b"did left"]


def test_client_that_waits_for_nothing_does_not_lose_its_hub_by_time_alone() -> None:
    pair = joined()
    assert pair.client.loss(pair.now_s + 1e6) == pair.client.trouble(pair.now_s + 1e6) == ""


def test_first_connection_that_is_refused_is_told_as_such() -> None:
    client = ClientProtocol(NO_SESSION, 30.0)
    client.request(Op.HELLO, Hello(client="test"), [], 1.0)
    assert "silent" in client.trouble(100.0)
    client.refused(2.0)
    assert client.trouble(100.0) == "connections to its address are refused"


def test_reconnect_timeout_is_the_clients_own() -> None:
    pair = joined()
    pair.client.reconnect_s = 2.0
    step_on_its_way(pair)
    assert pair.client.loss(pair.now_s + 1.9) == ""
    assert "reconnect_timeout=2" in pair.client.loss(pair.now_s + 2.0)


def test_lost_connection_is_reported_within_four_seconds_also_without_a_pending_request() -> None:
    pair = joined()
    pair.disconnect()
    assert pair.client.trouble(pair.now_s + 0.2) == ""  # most are back by then
    assert pair.client.next_tick_s(pair.now_s) == pytest.approx(prelude.AWAY_WARNING_S)
    assert "lost" in pair.client.trouble(pair.now_s + prelude.AWAY_WARNING_S + 0.01)
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


def test_idle_client_sends_a_heartbeat_when_it_is_connected_again() -> None:
    pair = joined()
    pair.step(b"left")
    pair.disconnect()
    assert TOKEN in pair.hub.leases
    pair.reconnect()
    pair.advance(0)
    pair.settle()
    assert TOKEN not in pair.hub.leases
    pair.advance(10)
    assert pair.to_hub == []  # once is enough


def test_goodbye_says_why_the_session_is_lost() -> None:
    pair = joined()
    pair.hub.goodbye(TOKEN, Failure("draining", "hub", "the hub is shutting down"))
    pair.collect()
    assert pair.deliver_to_client() is None
    assert pair.client.loss(pair.now_s) == "the hub is shutting down"


def test_goodbye_to_another_session_is_dropped() -> None:
    pair = joined()
    body = messages.pack(Failure("draining", "hub", "the hub is shutting down"))
    pair.client.receive([Prelude(Op.GOODBYE, HUB_ID, bytes(16 * [7]), 0).pack() + body], pair.now_s)
    assert pair.client.loss(pair.now_s) == ""


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
    assert pair.hub.connection_of(TOKEN) == pair.connection, "it may be a new one of the same name, to be looked after"
    assert pair.hub.receive_step(step.peer, first, others) is None
    assert pair.hub.receive(step.peer, 7, step.frames) is not None and pair.hub.connection_of(TOKEN) == 7


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
    last = Prelude(Op.STEP, HUB_ID, TOKEN, prelude.SEQ_MAX).pack() + b"\x04"
    taken = pair.hub.receive(step.peer, step.connection, [last, b"left"])
    assert taken is not None
    pair.hub.answer(taken, messages.Done())
    assert len(pair.hub.outgoing) == 2
