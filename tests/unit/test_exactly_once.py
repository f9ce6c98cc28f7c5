from __future__ import annotations

import pytest
from protocol_pair import (
    HUB_ID,
    SESSION_REQUESTS,
    TOKEN,
    Packet,
    ProtocolPair,
    given_up,
    joined,
    sent,
    step_on_its_way,
)

from envhub.errors import RemoteProtocolError
from envhub.protocol import messages, prelude
from envhub.protocol.messages import Close, Done, HeartbeatReply, Make, Op, Question, Reset, Step
from envhub.protocol.prelude import NO_SESSION, Prelude

REPLY = messages.REPLY


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
    assert [reply.frames for reply in pair.replies if reply.op is Op.STEP] == [[b"did left"]]


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
    pair.advance(prelude.HEARTBEAT_S)
    assert Prelude.unpack(pair.to_hub[0].frames[0]).op == Op.HEARTBEAT
    pair.settle()
    pair.advance(0)
    pair.settle()
    assert pair.replies[-1].frames == [b"did left"]


def test_lost_reply_is_sent_again_after_a_heartbeat() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.lose_reply()
    assert pair.replies[-1].frames == [b"did left"]
    assert [request.op for request in pair.carried_out].count(Op.STEP) == 1


def test_request_that_was_sent_again_is_asked_after_again() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.to_hub.clear()
    pair.advance(prelude.HEARTBEAT_S)
    pair.settle()
    sent_again = []
    for seconds in (0.0, prelude.HEARTBEAT_S):
        pair.advance(seconds)
        sent_again.append(Prelude.unpack(pair.to_hub.pop().frames[0]).op)
    assert sent_again == [Op.STEP, Op.HEARTBEAT]


def test_running_request_is_not_sent_again() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    for _ in range(10):
        pair.advance(prelude.HEARTBEAT_S)
        assert [Prelude.unpack(packet.frames[0]).op for packet in pair.to_hub] == [Op.HEARTBEAT]
        pair.deliver_to_hub()
        pair.deliver_to_client()
    assert pair.hub.replayed == 0


def test_client_says_nothing_before_the_first_heartbeat_is_due() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.to_hub.clear()
    pair.advance(prelude.HEARTBEAT_S * 0.9)
    assert pair.to_hub == []
    assert pair.client.next_tick_s(pair.now_s) == pytest.approx(prelude.HEARTBEAT_S * 0.1)


def test_idle_client_sends_no_heartbeats() -> None:
    pair = joined()
    pair.advance(100.0)
    assert pair.to_hub == []


def test_question_without_a_session_is_asked_again_every_second() -> None:
    pair = ProtocolPair()
    pair.hello()
    pair.request(Op.LIST, Question())
    pair.to_hub.clear()
    pair.advance(prelude.HEARTBEAT_S)
    pair.advance(prelude.HEARTBEAT_S)
    assert [Prelude.unpack(packet.frames[0]).op for packet in pair.to_hub] == [Op.LIST, Op.LIST]
    pair.settle()
    assert [reply.message.names for reply in pair.replies if reply.op is Op.LIST] == [["CartPole-v1"]]


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


def test_second_make_of_a_session_is_refused_and_the_session_goes_on() -> None:
    pair = joined()
    failure = sent(pair, Op.MAKE, 2, messages.pack(Make(1)))
    assert failure.code == "bad_seq" and "made already" in failure.message
    assert pair.step(b"left").frames == [b"did left"]


# --- requests that were given up --------------------------------------------------------------------------------------


def test_request_is_held_back_until_the_one_that_was_given_up_has_ended() -> None:
    pair = given_up()
    for _ in range(3):
        pair.advance(prelude.HEARTBEAT_S)
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
    pair.advance(prelude.HEARTBEAT_S)
    pair.settle()
    assert pair.replies[-1].op is Op.RESET and [request.seq for request in pair.carried_out[1:]] == [1, 2, 3]


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


def test_close_does_not_wait_for_what_was_given_up() -> None:
    pair = given_up()
    pair.client.give_up()
    pair.request(Op.CLOSE, Close())
    assert pair.deliver_to_hub() is not None
    pair.settle()
    assert pair.replies[-1].op is Op.CLOSE


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


def test_given_up_question_without_a_session_holds_nothing_back() -> None:
    pair = joined()
    pair.request(Op.LIST, Question())
    pair.client.give_up()
    assert pair.step(b"left").frames == [b"did left"]


def test_reply_without_a_pending_request_is_dropped() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    pair.finish()
    pair.to_client *= 2
    assert pair.deliver_to_client() is not None
    assert pair.deliver_to_client() is None


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
