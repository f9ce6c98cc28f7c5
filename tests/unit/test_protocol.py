from __future__ import annotations

import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from protocol_pair import HUB_ID, SESSION_REQUESTS, TOKEN, Packet, ProtocolPair, failure_in, joined

from envhub import messages, protocol
from envhub.client_protocol import ClientProtocol
from envhub.errors import RemoteProtocolError
from envhub.hub_protocol import HubProtocol
from envhub.messages import Close, Done, Failure, HeartbeatReply, Hello, ListEnvs, Make, Op, Reset, Step
from envhub.protocol import NO_SESSION, Prelude

REPLY = messages.REPLY


def sent(pair: ProtocolPair, op: int, seq: int, body: bytes = b"", *frames: bytes, token: bytes = TOKEN) -> Failure:
    """Send raw frames to the hub and return the failure it answers at once."""
    head = Prelude(op, HUB_ID, token, seq).pack() + body
    pair.to_hub.append(Packet(pair.peer, pair.connection, [head, *frames]))
    assert pair.deliver_to_hub() is None
    return failure_in(pair.to_client.pop())


def step_on_its_way(pair: ProtocolPair, actions: bytes = b"left") -> None:
    pair.request(Op.STEP, Step(b"\x04"), actions)


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


def test_client_learns_the_hub_id_from_the_reply_to_hello() -> None:
    pair = ProtocolPair()
    assert pair.client.hub_id == 0
    pair.hello()
    assert pair.client.hub_id == HUB_ID


def test_request_of_another_major_version_is_refused_and_both_versions_are_named() -> None:
    pair = ProtocolPair()
    head = Prelude(Op.HELLO, 0, NO_SESSION, 1, major=2, minor=7).pack() + messages.pack(Hello())
    pair.to_hub.append(Packet(pair.peer, 1, [head]))
    assert pair.deliver_to_hub() is None
    failure = failure_in(pair.to_client[0])
    assert (failure.code, failure.scope) == ("unsupported_version", "hub")
    assert "1.0" in failure.message and "2.7" in failure.message


def test_refused_version_reaches_the_client_as_the_reply_to_its_hello() -> None:
    pair = ProtocolPair()
    pair.request(Op.HELLO, Hello())
    hello = pair.to_hub.pop()
    pair.to_hub.append(Packet(hello.peer, 1, [hello.frames[0][:4] + b"\x02" + hello.frames[0][5:]]))
    pair.settle()
    assert pair.replies[0].message.code == "unsupported_version"
    assert pair.client.hub_id == 0


def test_request_of_a_newer_minor_version_is_understood() -> None:
    hub = HubProtocol(HUB_ID)
    head = Prelude(Op.HELLO, 0, NO_SESSION, 1, minor=99).pack() + messages.pack(Hello())
    incoming = hub.receive(b"peer", 1, [head])
    assert incoming is not None and incoming.op is Op.HELLO


# --- exactly once -----------------------------------------------------------------------------------------------------


def test_reply_carries_the_frames_of_its_own_request() -> None:
    pair = joined()
    assert pair.step(b"left").frames == [b"did left"]
    assert pair.step(b"right").frames == [b"did right"]


def test_duplicated_step_runs_once_and_is_answered_from_the_cache() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.to_hub *= 2
    pair.settle()
    assert [request.op for request in pair.carried_out].count(Op.STEP) == 1
    assert pair.hub.replayed == 1
    assert pair.replies[-1].frames == [b"did left"]
    assert pair.client.dropped == 1  # the second copy of the reply


def test_duplicate_of_a_running_request_joins_it_and_gets_the_one_reply() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.to_hub *= 2
    pair.deliver_to_hub()
    assert pair.deliver_to_hub() is None
    assert pair.to_client == []
    pair.finish()
    assert len(pair.to_client) == 1


def test_reply_to_a_joined_request_goes_to_the_connection_it_was_last_heard_on() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    pair.disconnect()
    pair.reconnect()
    pair.advance(0)
    pair.deliver_to_hub()  # a heartbeat, from another routing id
    pair.settle()
    assert pair.replies[-1].frames == [b"did left"]
    assert [request.op for request in pair.carried_out].count(Op.STEP) == 1


def test_lost_request_is_sent_again_after_a_heartbeat() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.to_hub.clear()
    pair.advance(protocol.HEARTBEAT_S)
    assert Prelude.unpack(pair.to_hub[0].frames[0]).op == Op.HEARTBEAT
    pair.settle()
    pair.advance(0)
    pair.settle()
    assert pair.replies[-1].frames == [b"did left"]


def test_lost_reply_is_sent_again_after_a_heartbeat() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    pair.finish()
    pair.to_client.clear()
    pair.advance(protocol.HEARTBEAT_S)
    pair.settle()
    pair.advance(0)
    pair.settle()
    assert pair.replies[-1].frames == [b"did left"]
    assert [request.op for request in pair.carried_out].count(Op.STEP) == 1


def test_request_that_was_sent_again_is_asked_after_again() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.to_hub.clear()
    pair.advance(protocol.HEARTBEAT_S)
    pair.settle()
    sent_again = []
    for seconds in (0.0, protocol.HEARTBEAT_S):
        pair.advance(seconds)
        sent_again.append(Prelude.unpack(pair.to_hub.pop().frames[0]).op)
    assert sent_again == [Op.STEP, Op.HEARTBEAT]


def test_running_request_is_not_sent_again() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    for _ in range(10):
        pair.advance(protocol.HEARTBEAT_S)
        assert [Prelude.unpack(packet.frames[0]).op for packet in pair.to_hub] == [Op.HEARTBEAT]
        pair.deliver_to_hub()
        pair.deliver_to_client()
    assert pair.hub.replayed == 0


def test_client_says_nothing_before_the_first_heartbeat_is_due() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.to_hub.clear()
    pair.advance(protocol.HEARTBEAT_S * 0.9)
    assert pair.to_hub == []
    assert pair.client.next_tick_s(pair.now_s) == pytest.approx(protocol.HEARTBEAT_S * 0.1)


def test_idle_client_sends_no_heartbeats() -> None:
    pair = joined()
    pair.advance(100.0)
    assert pair.to_hub == []


def test_question_without_a_session_is_asked_again_every_second() -> None:
    pair = ProtocolPair()
    pair.hello()
    pair.request(Op.LIST, ListEnvs())
    pair.to_hub.clear()
    pair.advance(protocol.HEARTBEAT_S)
    pair.advance(protocol.HEARTBEAT_S)
    assert [Prelude.unpack(packet.frames[0]).op for packet in pair.to_hub] == [Op.LIST, Op.LIST]
    pair.settle()
    assert pair.replies[-1].message.names == ["CartPole-v1"]
    assert pair.client.dropped == 1


@pytest.mark.parametrize(
    ("seq", "finished", "state"),
    [(2, True, "answered"), (2, False, "running"), (1, True, "answered"), (3, True, "unknown")],
)
def test_heartbeat_says_where_the_request_stands(seq: int, finished: bool, state: str) -> None:
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


# --- sequence numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [0, 1])
def test_request_out_of_order_is_refused_and_not_carried_out(seq: int) -> None:
    pair = joined()
    pair.step(b"left")  # request 2
    failure = sent(pair, Op.STEP, seq, b"\x04", b"right")
    assert (failure.code, failure.scope) == ("bad_seq", "request")
    assert str(seq) in failure.message


def test_request_that_overtakes_a_running_one_is_refused() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    failure = sent(pair, Op.STEP, 3, b"\x04", b"right")
    assert failure.code == "bad_seq" and "runs" in failure.message
    pair.finish()
    assert pair.deliver_to_client() is not None


def test_refused_request_does_not_use_up_its_number() -> None:
    pair = joined()
    sent(pair, Op.STEP, 0, b"\x04")
    assert pair.step(b"left").frames == [b"did left"]


def test_client_that_gave_requests_up_goes_on() -> None:
    pair = joined()
    pair.client.request(Op.STEP, Step(b"\x04"), [b"never sent"], pair.now_s)
    pair.client.give_up()
    assert pair.step(b"left").frames == [b"did left"]


def test_close_overtakes_a_request_that_runs() -> None:
    pair = joined()
    step_on_its_way(pair)
    running = pair.deliver_to_hub()
    pair.client.give_up()
    pair.request(Op.CLOSE, Close(True))
    closing = pair.deliver_to_hub()
    assert running is not None and closing is not None and closing.op is Op.CLOSE
    pair.hub.answer(running, Done())
    pair.hub.answer(closing, Done())
    pair.collect()
    assert pair.deliver_to_client() is None and pair.client.pending is Op.CLOSE
    reply = pair.deliver_to_client()
    assert reply is not None and reply.op is Op.CLOSE


def test_session_with_the_token_of_none_is_refused() -> None:
    pair = joined()
    assert sent(pair, Op.MAKE, 1, messages.pack(Make(1)), token=protocol.NO_SESSION).code == "malformed"


def test_second_make_of_a_session_is_refused_and_the_session_goes_on() -> None:
    pair = joined()
    failure = sent(pair, Op.MAKE, 2, messages.pack(Make(1)))
    assert failure.code == "bad_seq" and "made already" in failure.message
    assert pair.step(b"left").frames == [b"did left"]


# --- sessions that are not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.RESET, Op.STEP, Op.CALL, Op.SET_ATTR, Op.CLOSE])
def test_request_for_an_unknown_session_is_told_that_it_is_lost(op: Op) -> None:
    failure = sent(ProtocolPair(), op, 1)
    assert (failure.code, failure.scope) == ("session_lost", "session")


def test_request_after_close_is_told_that_the_session_is_lost() -> None:
    pair = joined()
    pair.ask(Op.CLOSE, Close())
    assert pair.ask(Op.RESET, Reset()).message.code == "session_lost"


def test_lost_reply_to_close_is_sent_again() -> None:
    pair = joined()
    pair.request(Op.CLOSE, Close())
    pair.deliver_to_hub()
    pair.finish()
    pair.to_client.clear()
    pair.advance(protocol.HEARTBEAT_S)
    pair.settle()
    pair.advance(0)
    pair.settle()
    assert pair.replies[-1].message == messages.Done()


def test_late_copy_of_a_make_does_not_make_the_closed_session_again() -> None:
    pair = ProtocolPair()
    pair.hello()
    pair.request(Op.MAKE, Make(2, "CartPole-v1"))
    late = pair.to_hub[0]
    pair.settle()
    pair.ask(Op.CLOSE, Close())
    pair.to_hub.append(late)
    assert pair.deliver_to_hub() is None
    assert failure_in(pair.to_client[0]).code == "session_lost"
    assert pair.hub.peers_of(1) == []


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
    for number in range(1, protocol.ENDED_MAX + 11):
        token = number.to_bytes(16, "big")
        assert hub.receive(b"peer", 1, [Prelude(Op.MAKE, HUB_ID, token, 1).pack() + body]) is not None
        hub.forget(token)
    oldest = (1).to_bytes(16, "big")
    first = hub.receive(b"peer", 1, [Prelude(Op.MAKE, HUB_ID, oldest, 1).pack() + body])
    assert first is not None  # so long ago that it is new again
    hub.forget(oldest)
    assert hub.receive(b"peer", 1, [Prelude(Op.MAKE, HUB_ID, token, 1).pack() + body]) is None


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
    pair.advance(protocol.HEARTBEAT_S)
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


# --- malformed requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [0, 7, 63, Op.PING, Op.FAILURE, REPLY | Op.STEP, REPLY | Op.FAILURE, 255])
def test_request_with_an_unknown_op_is_refused(op: int) -> None:
    failure = sent(joined(), op, 2)
    assert (failure.code, failure.scope) == ("malformed", "request")


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


def test_request_with_too_many_frames_is_answered_and_the_session_goes_on() -> None:
    pair = joined()
    reply = pair.ask(Op.STEP, Step(b"\x04"), *[b""] * protocol.FRAMES_MAX)
    assert reply.message.code == "malformed" and str(protocol.FRAMES_MAX) in reply.message.message
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


def test_request_for_a_dead_hub_is_refused_by_the_next() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.hub = HubProtocol(HUB_ID + 1)
    assert pair.deliver_to_hub() is None
    assert failure_in(pair.to_client[0]).code == "stale_hub"
    assert pair.deliver_to_client() is None
    assert "another hub" in pair.client.loss(pair.now_s)


@pytest.mark.parametrize("op", [Op.LIST, Op.HEALTH, Op.HEARTBEAT, Op.MAKE, Op.CLOSE])
def test_every_request_but_hello_is_refused_by_another_hub(op: Op) -> None:
    hub = HubProtocol(HUB_ID + 1)
    assert hub.receive(b"peer", 1, [Prelude(op, HUB_ID, TOKEN, 1).pack() + b"\x80"]) is None
    assert messages.unpack(Failure, bytes(hub.outgoing[0][1][0])[40:]).code == "stale_hub"
    assert hub.refused == 1


# --- what is no reply -------------------------------------------------------------------------------------------------


def test_reply_to_an_abandoned_request_is_dropped() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    pair.client.give_up()
    pair.finish()
    pair.request(Op.RESET, Reset())
    assert pair.deliver_to_client() is None
    assert pair.client.dropped == 1
    assert pair.client.pending is Op.RESET
    pair.advance(0)
    pair.settle()
    assert pair.replies[-1].op is Op.RESET


# --- requests that were given up --------------------------------------------------------------------------------------


def given_up() -> ProtocolPair:
    """A pair whose hub carries out a step that nobody waits for, and whose client wants a reset."""
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    pair.client.give_up()
    assert pair.client.pending is None
    pair.request(Op.RESET, Reset())
    return pair


def test_request_is_held_back_until_the_one_that_was_given_up_has_ended() -> None:
    pair = given_up()
    for _ in range(3):
        pair.advance(protocol.HEARTBEAT_S)
        (question,) = pair.to_hub
        assert Prelude.unpack(question.frames[0])[:4] == (Op.HEARTBEAT, HUB_ID, TOKEN, 2)
        pair.deliver_to_hub()
        pair.deliver_to_client()
        assert pair.client.held and pair.client.loss(pair.now_s) == ""
    pair.finish()
    pair.deliver_to_client()
    assert not pair.client.held and pair.client.pending is Op.RESET
    pair.advance(0)
    pair.settle()
    assert pair.replies[-1].op is Op.RESET and [request.seq for request in pair.carried_out[1:]] == [1, 2, 3]


def test_request_is_sent_at_once_if_the_one_that_was_given_up_never_arrived() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.to_hub.clear()
    pair.client.give_up()
    pair.request(Op.RESET, Reset())
    assert pair.to_hub == []
    pair.advance(0)  # it asks
    pair.deliver_to_hub()
    pair.deliver_to_client()
    pair.advance(0)
    pair.settle()
    assert pair.replies[-1].op is Op.RESET and [request.seq for request in pair.carried_out[1:]] == [1, 3]


def test_copy_of_a_given_up_request_that_comes_late_delays_the_next_one_only() -> None:
    pair = joined()
    step_on_its_way(pair)
    late = pair.to_hub.pop()
    pair.client.give_up()
    pair.request(Op.RESET, Reset())
    pair.advance(0)
    pair.deliver_to_hub()
    pair.deliver_to_client()  # the hub knows nothing of the step
    pair.advance(0)
    pair.to_hub.insert(0, late)
    pair.deliver_to_hub()
    assert pair.deliver_to_hub() is None  # bad_seq, while the step runs
    pair.deliver_to_client()
    assert pair.client.pending is Op.RESET
    pair.finish()
    pair.advance(protocol.HEARTBEAT_S)
    pair.settle()
    assert pair.replies[-1].op is Op.RESET and [request.seq for request in pair.carried_out[1:]] == [1, 2, 3]


def test_close_does_not_wait_for_what_was_given_up() -> None:
    pair = given_up()
    pair.client.give_up()
    pair.request(Op.CLOSE, Close())
    assert pair.deliver_to_hub() is not None
    pair.settle()
    assert pair.replies[-1].op is Op.CLOSE


def test_request_that_was_refused_before_it_was_sent_is_not_waited_for() -> None:
    pair = joined()
    pair.client.request(Op.CALL, SESSION_REQUESTS[Op.CALL], [], pair.now_s)
    pair.client.withdraw()
    pair.client.give_up()
    assert pair.step(b"left").frames == [b"did left"]


def test_given_up_question_without_a_session_holds_nothing_back() -> None:
    pair = joined()
    pair.request(Op.LIST, ListEnvs())
    pair.client.give_up()
    assert pair.step(b"left").frames == [b"did left"]


def test_reply_that_nobody_waits_for_is_dropped() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    pair.finish()
    pair.to_client *= 2
    assert pair.deliver_to_client() is not None
    assert pair.deliver_to_client() is None
    assert pair.client.dropped == 1


@pytest.mark.parametrize("op", [Op.PING, Op.STEP, Op.FAILURE])
def test_message_without_the_reply_bit_is_never_taken_for_a_reply(op: Op) -> None:
    pair = joined()
    step_on_its_way(pair)
    push = Prelude(op, HUB_ID, TOKEN, 2).pack()  # even with the token and number of the pending request
    assert pair.client.receive([push], pair.now_s) is None
    assert pair.client.pending is Op.STEP


def test_ping_is_a_sign_of_life() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.now_s += 50.0
    assert "silent" in pair.client.trouble(pair.now_s)
    pair.client.receive([Prelude(Op.PING, HUB_ID, NO_SESSION, 0).pack()], pair.now_s)
    assert pair.client.trouble(pair.now_s) == ""


@pytest.mark.parametrize(
    ("token", "seq"),
    [(TOKEN, 1), (TOKEN, 3), (NO_SESSION, 2), (bytes(16 * [7]), 2)],
    ids=["older", "newer", "none", "other"],
)
def test_reply_with_another_token_or_number_is_dropped(token: bytes, seq: int) -> None:
    pair = joined()
    step_on_its_way(pair)
    assert pair.client.receive([Prelude(REPLY | Op.STEP, HUB_ID, token, seq).pack(), b"stale"], pair.now_s) is None
    assert pair.client.pending is Op.STEP
    assert pair.client.dropped == 1


def test_reply_with_another_op_breaks_the_protocol() -> None:
    pair = joined()
    step_on_its_way(pair)
    with pytest.raises(RemoteProtocolError, match="STEP"):
        pair.client.receive([Prelude(REPLY | Op.RESET, HUB_ID, TOKEN, 2).pack()], pair.now_s)


def test_malformed_reply_breaks_the_protocol() -> None:
    pair = ProtocolPair()
    pair.hello()
    pair.request(Op.MAKE, Make(1))
    with pytest.raises(RemoteProtocolError, match="MAKE"):
        pair.client.receive([Prelude(REPLY | Op.MAKE, HUB_ID, TOKEN, 1).pack() + b"\x80"], pair.now_s)


def test_second_request_while_one_is_pending_is_a_mistake_of_the_caller() -> None:
    pair = joined()
    step_on_its_way(pair)
    with pytest.raises(RuntimeError, match="STEP is pending"):
        pair.request(Op.RESET, Reset())


# --- leases -----------------------------------------------------------------------------------------------------------


def test_session_expires_when_its_lease_has_run_out() -> None:
    pair = ProtocolPair(lease_s=60.0)
    pair.make()
    assert pair.hub.next_expiry_s() is None
    pair.disconnect()
    assert pair.hub.leased(TOKEN)
    assert pair.hub.next_expiry_s() == pair.now_s + 60.0
    assert pair.hub.expired(pair.now_s + 59.9) == []
    assert pair.hub.expired(pair.now_s + 60.0) == [TOKEN]


def test_connected_session_never_expires() -> None:
    pair = joined()
    assert pair.hub.expired(pair.now_s + 1e9) == []
    assert not pair.hub.leased(TOKEN)


def test_lease_ends_when_the_client_is_heard_on_another_connection() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.disconnect()
    pair.reconnect()
    pair.advance(0)
    pair.settle()
    assert not pair.hub.leased(TOKEN)
    assert pair.hub.peers_of(2) == [(TOKEN, b"peer-2")]


def test_end_of_an_old_connection_does_not_concern_a_client_that_moved() -> None:
    pair = joined()
    pair.reconnect()
    pair.step(b"left")
    assert pair.hub.peers_of(1) == []


def test_session_goes_on_in_the_same_state_after_a_reconnect() -> None:
    pair = joined()
    pair.step(b"left")
    pair.disconnect()
    pair.reconnect()
    assert pair.step(b"right").frames == [b"did right"]
    assert [request.seq for request in pair.carried_out if request.token == TOKEN] == [1, 2, 3]


def test_request_sent_without_a_connection_is_sent_once_there_is_one() -> None:
    pair = joined()
    pair.disconnect()
    step_on_its_way(pair)
    assert pair.to_hub == []
    pair.reconnect()
    pair.advance(0)
    pair.settle()
    pair.advance(0)
    pair.settle()
    assert pair.replies[-1].frames == [b"did left"]


# --- when a hub is lost -----------------------------------------------------------------------------------------------


def test_hub_is_lost_when_connections_are_refused_for_five_seconds() -> None:
    client = joined().client
    client.refused(10.0)
    client.refused(14.0)
    assert client.loss(14.9) == ""
    assert "refused for 5 s" in client.loss(15.0)


def test_refused_connections_are_forgotten_once_one_is_made() -> None:
    client = joined().client
    client.refused(10.0)
    client.connected()
    client.refused(20.0)
    assert client.loss(24.0) == ""


def test_hub_out_of_reach_is_lost_after_the_reconnect_timeout() -> None:
    pair = joined()
    pair.disconnect()
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
        pair.advance(protocol.HEARTBEAT_S)
        pair.deliver_to_hub()
        pair.deliver_to_client()
        assert pair.client.loss(pair.now_s) == pair.client.trouble(pair.now_s) == ""
    pair.settle()
    assert pair.replies[-1].frames == [b"did left"]


def test_client_that_waits_for_nothing_does_not_lose_its_hub_by_time_alone() -> None:
    pair = joined()
    assert pair.client.loss(pair.now_s + 1e6) == pair.client.trouble(pair.now_s + 1e6) == ""


def test_reconnect_timeout_is_the_clients_own() -> None:
    pair = joined()
    pair.client.reconnect_s = 2.0
    step_on_its_way(pair)
    assert pair.client.loss(pair.now_s + 1.9) == ""
    assert "reconnect_timeout=2" in pair.client.loss(pair.now_s + 2.0)


def test_lost_connection_is_told_within_four_seconds_also_where_nothing_is_pending() -> None:
    pair = joined()
    pair.disconnect()
    assert pair.client.trouble(pair.now_s + 0.2) == ""  # most are back by then
    assert pair.client.next_tick_s(pair.now_s) == pytest.approx(protocol.AWAY_WARNING_S)
    assert "lost" in pair.client.trouble(pair.now_s + protocol.AWAY_WARNING_S + 0.01)
    pair.reconnect()
    assert pair.client.trouble(pair.now_s + 9.0) == ""


def test_silent_hub_is_told_within_four_seconds_by_who_waits_for_it() -> None:
    pair = joined()
    step_on_its_way(pair)
    waited_s = 0.0
    while not pair.client.trouble(pair.now_s):
        waits_s = max(pair.client.next_tick_s(pair.now_s), 0.001)
        waited_s += waits_s
        pair.advance(waits_s)
    assert 3.0 < waited_s < 4.0


def test_idle_client_tells_the_hub_when_it_is_connected_again() -> None:
    pair = joined()
    pair.step(b"left")
    pair.disconnect()
    assert pair.hub.leased(TOKEN)
    pair.reconnect()
    pair.advance(0)
    pair.settle()
    assert not pair.hub.leased(TOKEN)
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


# --- any network ------------------------------------------------------------------------------------------------------


class AnyNetwork(RuleBasedStateMachine):
    """Whatever the network does, what the client is told is what the hub did, once and in order."""

    @initialize()
    def begin(self) -> None:
        self.pair = ProtocolPair(lease_s=float("inf"))
        self.pair.hello()
        self.payloads: dict[int, bytes] = {}  # by the request's number
        self.given_up: set[int] = set()
        self.closing = False

    @property
    def seq(self) -> int:
        return len(self.payloads)

    @precondition(lambda self: self.pair.client.pending is None and not self.closing)
    @rule(op=st.sampled_from([Op.STEP, Op.STEP, Op.RESET, Op.CALL, Op.CLOSE]))
    def request(self, op: Op) -> None:
        payload = b"%d" % (self.seq + 1)
        self.payloads[self.seq + 1] = payload
        if self.seq == 1:
            self.pair.request(Op.MAKE, Make(2, "CartPole-v1"), payload)
            return
        self.closing = op is Op.CLOSE
        self.pair.request(op, SESSION_REQUESTS[op], payload)

    @precondition(lambda self: self.seq > 1 and self.pair.client.pending is not None and not self.closing)
    @rule()
    def give_up(self) -> None:
        self.given_up.add(self.seq)
        self.pair.client.give_up()

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.pair.advance(seconds)

    @precondition(lambda self: self.pair.to_hub)
    @rule(data=st.data(), copies=st.integers(0, 2))
    def move_to_hub(self, data: st.DataObject, copies: int) -> None:
        index = data.draw(st.integers(0, len(self.pair.to_hub) - 1))
        self.pair.to_hub += [self.pair.to_hub[index]] * copies
        self.pair.deliver_to_hub(index)

    @precondition(lambda self: self.pair.to_client)
    @rule(data=st.data(), copies=st.integers(0, 2))
    def move_to_client(self, data: st.DataObject, copies: int) -> None:
        index = data.draw(st.integers(0, len(self.pair.to_client) - 1))
        self.pair.to_client += [self.pair.to_client[index]] * copies
        self.deliver(index)

    @precondition(lambda self: self.pair.to_hub)
    @rule(data=st.data())
    def lose_a_request(self, data: st.DataObject) -> None:
        self.pair.to_hub.pop(data.draw(st.integers(0, len(self.pair.to_hub) - 1)))

    @precondition(lambda self: self.pair.to_client)
    @rule(data=st.data())
    def lose_a_reply(self, data: st.DataObject) -> None:
        self.pair.to_client.pop(data.draw(st.integers(0, len(self.pair.to_client) - 1)))

    @precondition(lambda self: self.pair.running)
    @rule()
    def finish(self) -> None:
        self.pair.finish()

    @precondition(lambda self: self.pair.connected)
    @rule()
    def disconnect(self) -> None:
        self.pair.disconnect()

    @precondition(lambda self: not self.pair.connected)
    @rule()
    def reconnect(self) -> None:
        self.pair.reconnect()

    def deliver(self, index: int = 0) -> None:
        reply = self.pair.deliver_to_client(index)
        if reply is None:
            return
        assert not isinstance(reply.message, Failure), reply.message
        if reply.op not in (Op.MAKE, Op.CLOSE):  # their replies have no frames
            assert reply.frames == [b"did " + self.payloads[self.seq]]  # of the newest request, the only one pending

    @invariant()
    def every_request_is_carried_out_once_and_in_order(self) -> None:
        done = [request for request in self.pair.carried_out if request.token == TOKEN]
        numbers = [request.seq for request in done]
        assert numbers == sorted(set(numbers))
        assert [request.frames[0] for request in done] == [self.payloads[number] for number in numbers]
        answered = set(range(1, self.seq + (self.pair.client.pending is None))) - self.given_up
        assert answered <= set(numbers)

    def teardown(self) -> None:
        """Once the network works again, the pending request gets its reply."""
        if not hasattr(self, "pair"):
            return
        if not self.pair.connected:
            self.pair.reconnect()
        for _ in range(6):
            self.pair.advance(protocol.HEARTBEAT_S)
            while self.pair.to_hub or self.pair.running or self.pair.to_client:
                if self.pair.to_client:
                    self.deliver()
                elif self.pair.to_hub:
                    self.pair.deliver_to_hub()
                else:
                    self.pair.finish()
            self.every_request_is_carried_out_once_and_in_order()
        assert self.pair.client.pending is None


TestAnyNetwork = AnyNetwork.TestCase
TestAnyNetwork.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
