"""What the client's half of the protocol takes for an answer, and what it says of its hub: a rule a test."""

from __future__ import annotations

import pytest
from protocol_pair import HUB_ID, MADE, TOKEN, ProtocolPair, given_up, joined, step_on_its_way

from envhub.errors import RemoteProtocolError
from envhub.protocol import messages, prelude
from envhub.protocol.client import AWAY_WARNING_S, CUTS_MAX, HEARTBEAT_S, NOTICES_MAX, ClientProtocol, Reply
from envhub.protocol.messages import Close, EnvNames, Failure, HeartbeatReply, Hello, Make, Notice, Op, Question, Reset
from envhub.protocol.prelude import NO_SESSION, Prelude
from envhub.protocol.validation import TEXT_CHARS_MAX

REPLY = messages.REPLY
WELCOME = messages.pack(messages.Welcome("1", "1", False, {}))
BAD_SEQ = Failure("bad_seq", "request", "request 3 does not follow request 2, which runs")


def say(pair: ProtocolPair, op: int, seq: int, message: object = None, token: bytes = TOKEN) -> Reply | None:
    """What the client makes of this message of the hub."""
    body = b"" if message is None else messages.pack(message)
    return pair.client.receive([Prelude(op, HUB_ID, token, seq).pack() + body], pair.now_s)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_reply_without_its_message_breaks_the_protocol() -> None:
    pair = ProtocolPair()
    pair.hello()
    pair.request(Op.MAKE, Make(1))
    with pytest.raises(RemoteProtocolError, match="MAKE"):
        say(pair, REPLY | Op.MAKE, 1)


def test_hub_without_an_id_breaks_the_protocol() -> None:
    pair = ProtocolPair()
    pair.request(Op.HELLO, Hello("1"))
    with pytest.raises(RemoteProtocolError, match="a hub id of 0"):
        pair.client.receive([Prelude(REPLY | Op.HELLO, 0, NO_SESSION, 1).pack() + WELCOME], pair.now_s)


def test_session_that_a_failure_has_ended_is_lost_without_another_request() -> None:
    pair = joined()
    step_on_its_way(pair)
    over = Failure("session_lost", "session", "it was closed")
    found = say(pair, REPLY | Op.FAILURE, pair.client.last_seq, over)
    assert found is not None and found.message == pair.client.goodbye == over
    assert pair.client.loss(pair.now_s) == "it was closed"


def test_number_out_of_its_bounds_breaks_the_protocol() -> None:
    pair = ProtocolPair()
    pair.hello()
    pair.request(Op.MAKE, Make(1))
    with pytest.raises(RemoteProtocolError, match="num_envs"):
        say(pair, REPLY | Op.MAKE, 1, messages.Made(0, *list(vars(MADE).values())[1:4]))


def test_refused_number_is_no_answer_while_a_copy_of_a_request_that_was_given_up_may_run() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.client.give_up()
    pair.client.give_up()  # nothing is pending
    pair.request(Op.RESET, Reset())
    assert say(pair, REPLY | Op.HEARTBEAT, 2, HeartbeatReply("unknown")) is None
    assert say(pair, REPLY | Op.FAILURE, 3, BAD_SEQ) is None and pair.pending is Op.RESET
    other = Failure("env_raised", "env", "no", env_index=0)
    found = say(pair, REPLY | Op.FAILURE, 3, other)
    assert found is not None and found.message == other


# --- requests that end their connection -------------------------------------------------------------------------------


def ended_connections(pair: ProtocolPair, state: str = "unknown") -> int:
    """How many connections end until the client gives the pending request up, if that is sent on each."""
    for count in range(1, 100):
        pair.disconnect()
        if pair.client.cut_off is not None:
            return count
        pair.reconnect()
        pair.advance(0)
        if pair.pending in messages.SESSION_OPS:
            say(pair, REPLY | Op.HEARTBEAT, 2, HeartbeatReply(state))
            pair.advance(0)
    raise AssertionError("it is sent for ever")


@pytest.mark.parametrize("state", ["unknown", "answered"])
def test_request_is_sent_no_more_once_it_has_ended_ten_connections(state: str) -> None:
    pair = joined()
    step_on_its_way(pair)
    assert ended_connections(pair, state) == CUTS_MAX
    pair.reconnect()
    pair.to_hub.clear()
    pair.advance(HEARTBEAT_S)
    assert not pair.to_hub
    pair.client.give_up()
    assert pair.ask(Op.RESET, Reset()).op is Op.RESET


@pytest.mark.parametrize("state", ["unknown", "running"])
def test_connections_that_end_before_a_request_is_sent_or_while_it_runs_do_not_count(state: str) -> None:
    pair = joined()
    step_on_its_way(pair)
    for _ in range(3 * CUTS_MAX):
        pair.disconnect()
        pair.reconnect()
        if state == "running":
            pair.advance(0)
            say(pair, REPLY | Op.HEARTBEAT, 2, HeartbeatReply(state))
        assert pair.client.cut_off is None


def test_notices_of_the_session_are_kept_short_and_few() -> None:
    pair = joined()
    for token, op in ((bytes(16), Op.NOTICE), (bytes(15) + b"\x01", Op.NOTICE), (TOKEN, REPLY | Op.NOTICE)):
        assert say(pair, op, 0, Notice("no"), token) is None
    assert pair.client.notices == []
    for number in range(NOTICES_MAX + 2):
        assert say(pair, Op.NOTICE, 0, Notice(f"{number} " + "x" * TEXT_CHARS_MAX)) is None
    found = pair.client.notices
    assert [text.split()[0] for text in found] == [str(number) for number in range(NOTICES_MAX)]
    assert {len(text) for text in found} == {TEXT_CHARS_MAX}
    pair.client.request(Op.CLOSE, Close(), [], pair.now_s)
    assert say(pair, Op.NOTICE, 0, Notice("of the end")) is None and pair.client.notices[-1] == "of the end"


# --- requests that were given up --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "token", "seq", "message"),
    [
        (REPLY | Op.STEP, TOKEN, 1, None),
        (REPLY | Op.STEP, bytes(15) + b"\x01", 2, None),
        (REPLY | Op.HEARTBEAT, TOKEN, 2, HeartbeatReply("running")),
        (Op.STEP, TOKEN, 2, None),
    ],
)
def test_message_that_says_nothing_of_the_request_that_was_given_up_does_not_settle_it(
    op: int, token: bytes, seq: int, message: object
) -> None:
    pair = given_up()
    assert say(pair, op, seq, message, token) is None
    assert pair.client.unsettled and pair.holds


def test_request_that_was_given_up_ends_while_a_question_waits() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.client.give_up()
    pair.request(Op.LIST, Question())
    assert say(pair, REPLY | Op.STEP, 2) is None
    assert not pair.client.unsettled and pair.client.tick(pair.now_s) == []
    assert say(pair, REPLY | Op.STEP, 2) is None and not pair.client.unsettled


# --- the hub that is not heard ----------------------------------------------------------------------------------------


def test_reply_to_a_step_is_a_sign_of_life() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.client.disconnected(0.0)
    pair.client.disconnected(AWAY_WARNING_S)  # the time counts from the first end
    assert pair.client.trouble(AWAY_WARNING_S) == "the connection to it is lost"
    assert say(pair, REPLY | Op.STEP, 2) is not None and pair.client.trouble(pair.now_s + 100.0) == ""


def asked(pair: ProtocolPair, seconds: float) -> list[tuple[int, bytes]]:
    """The ops and tokens of what the client says once this time has passed."""
    pair.to_hub.clear()
    pair.advance(seconds)
    preludes = [Prelude.unpack(packet.frames[0]) for packet in pair.to_hub]
    return [(each.op, each.token) for each in preludes]


def test_hub_hears_once_from_which_session_a_new_connection_is() -> None:
    pair = joined()
    step_on_its_way(pair)
    pair.client.connected()
    assert asked(pair, 0.0) == [(Op.HEARTBEAT, TOKEN)]
    say(pair, REPLY | Op.STEP, 2)
    assert asked(pair, HEARTBEAT_S) == []  # it was the pending request's
    pair.request(Op.LIST, Question())
    pair.client.connected()
    assert asked(pair, 0.0) == [(Op.HEARTBEAT, TOKEN), (Op.LIST, NO_SESSION)]  # which may be all that it asks
    say(pair, REPLY | Op.LIST, pair.client._ticket, EnvNames([]), NO_SESSION)
    assert asked(pair, HEARTBEAT_S) == []
    pair.request(Op.LIST, Question())  # on a connection that the hub knows
    assert asked(pair, HEARTBEAT_S) == [(Op.LIST, NO_SESSION)]
    say(pair, REPLY | Op.LIST, pair.client._ticket, EnvNames([]), NO_SESSION)
    assert asked(pair, HEARTBEAT_S) == []


def test_refused_connections_are_told_of_a_hub_that_was_there() -> None:
    pair = joined()
    assert not pair.client.is_refused
    pair.client.disconnected(0.0)
    assert not pair.client.is_refused
    pair.client.refused(0.0)
    assert pair.client.is_refused
    told = pair.client.trouble(AWAY_WARNING_S)
    assert told == "the connection to it is lost, and others are refused"
    unknown = ClientProtocol(TOKEN)
    unknown.request(Op.HELLO, messages.Hello(), [], 100.0)
    unknown.refused(100.0)
    assert not unknown.is_refused and unknown.refused_s < 0
    assert unknown.loss(100.0 + 10 * prelude.RECONNECT_S) == "", "it may be starting: the timeout decides"


def test_first_reason_for_a_loss_is_told() -> None:
    client = ClientProtocol(TOKEN)
    client.lost("its process has ended")
    client.lost("another reason")
    assert client.loss(100.0) == "its process has ended"


def test_time_out_of_reach_counts_from_the_end_of_the_connection() -> None:
    pair = joined()
    step_on_its_way(pair)
    begun_s, away_s = pair.now_s, pair.now_s + prelude.RECONNECT_S / 2
    pair.client.disconnected(away_s)
    assert pair.client.loss(begun_s + prelude.RECONNECT_S) == ""
    assert "reconnect_timeout" in pair.client.loss(away_s + prelude.RECONNECT_S)


def test_time_in_which_the_program_was_stopped_is_no_silence_of_the_hub() -> None:
    pair = joined()
    pair.client.looked(pair.now_s)
    step_on_its_way(pair)
    since_s = pair.now_s
    pair.client.looked(since_s + 1)
    back_s = since_s + 1 + 2 * prelude.RECONNECT_S
    pair.client.looked(back_s)
    assert pair.client.silence_s(back_s) == 1 and pair.client.loss(back_s) == ""
    for second in range(1, int(prelude.RECONNECT_S) - 1):
        pair.client.looked(back_s + second)
    assert pair.client.loss(back_s + prelude.RECONNECT_S - 2) == ""
    assert "reconnect_timeout" in pair.client.loss(back_s + prelude.RECONNECT_S - 1)


def test_silence_lasts_from_the_request_or_the_loss_of_the_connection() -> None:
    pair = joined()
    assert pair.client.silence_s(pair.now_s + 9) == 0  # nothing was asked
    step_on_its_way(pair)
    assert pair.client.silence_s(pair.now_s + 2) == 2
    pair.now_s += 1
    say(pair, REPLY | Op.HEARTBEAT, pair.client.last_seq, HeartbeatReply("running"))  # it works on the request
    assert pair.client.silence_s(pair.now_s + 2) == 2
    assert say(pair, REPLY | Op.STEP, pair.client.last_seq) is not None
    assert pair.client.silence_s(pair.now_s + 9) == 0
    pair.client.disconnected(pair.now_s)
    assert pair.client.silence_s(pair.now_s + 3) == 3
    pair.client.connected()
    assert pair.client.silence_s(pair.now_s + 9) == 0
