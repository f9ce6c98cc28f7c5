"""What the hub's half of the protocol answers, remembers and forgets: rules of which each has its own test."""

from __future__ import annotations

import math
from typing import Any

import pytest
from protocol_pair import HUB_ID, MADE, TOKEN, Packet, failure_in, joined

from envhub.protocol import messages
from envhub.protocol.hub import CODE_CHARS_MAX, CODES_MAX, HubProtocol, Incoming
from envhub.protocol.messages import Attach, Close, Done, Failure, Make, Notice, Op, Question, Reset
from envhub.protocol.prelude import FRAMES_MAX, NO_SESSION, Prelude

REPLY = messages.REPLY
OTHER = bytes(range(100, 116))
FAILURE = Failure("limit", "hub", "too much")


def head(op: int, seq: int, message: Any = None, token: bytes = TOKEN) -> bytes:
    return Prelude(op, HUB_ID, token, seq).pack() + (b"\x04" if message is None else messages.pack(message))


def with_session(hub: HubProtocol, connection: int = 1, token: bytes = TOKEN, owner: str = "") -> Incoming:
    """Make a session by the first request, and return that."""
    made = hub.receive(b"peer", connection, [head(Op.MAKE, 1, Make(1, "x"), token)], owner)
    assert made is not None
    hub.answer(made, MADE)
    hub.outgoing.clear()
    return made


def answered(hub: HubProtocol) -> tuple[bytes, Prelude, bytes]:
    """The peer, the prelude and the body of the only message."""
    ((peer, frames),) = hub.outgoing
    hub.outgoing.clear()
    first = bytes(frames[0])
    return peer, Prelude.unpack(first), first[40:]


def refused(hub: HubProtocol) -> str:
    """The code of the failure that is the only message."""
    _, found, body = answered(hub)
    assert found.op == REPLY | Op.FAILURE
    return messages.unpack(Failure, body).code


# --- who may ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "message"), [(Op.MAKE, Make(1)), (Op.ATTACH, Attach(OTHER)), (Op.STEP, None), (Op.CLOSE, Close())]
)
def test_client_that_only_observes_uses_no_session(op: Op, message: Any) -> None:
    hub = HubProtocol(HUB_ID)
    with_session(hub)
    for token in (TOKEN, OTHER):
        assert hub.receive(b"peer", 1, [head(op, 2, message, token)], uses=False) is None
        assert refused(hub) == "not_permitted"
    assert (hub.failures["not_permitted"], hub.malformed) == (2, 0) and hub.peer_of(OTHER) is None


@pytest.mark.parametrize("runs", [False, True], ids=["answered", "running"])
def test_session_of_a_client_that_only_observes_by_now_is_kept_and_not_stepped(runs: bool) -> None:
    hub = HubProtocol(HUB_ID)
    with_session(hub)
    step = hub.receive(b"peer", 1, [head(Op.STEP, 2)])
    assert step is not None
    if not runs:
        hub.answer(step, Done())
    hub.connection_ended(1)
    heartbeat = hub.receive(b"again", 2, [head(Op.HEARTBEAT, 2, Question())], uses=False)
    assert (heartbeat is not None) is runs and hub.peer_of(TOKEN) == b"again"
    if runs:
        hub.answer(step, Done())
    hub.outgoing.clear()
    following = head(Op.STEP, 3)
    assert hub.receive_step(b"again", following, []) is None
    assert hub.receive(b"again", 2, [following], uses=False) is None and refused(hub) == "not_permitted"
    hub.receive(b"again", 2, [head(Op.HEARTBEAT, 3, Question())])  # of a client that may use it again
    assert hub.receive_step(b"again", following, []) is not None


def test_request_to_the_session_of_another_client_is_answered_as_if_there_were_none() -> None:
    hub = HubProtocol(HUB_ID)
    with_session(hub, owner="alice")
    assert hub.receive(b"eve", 7, [head(Op.STEP, 2)], "eve") is None
    assert hub.foreign == [(Op.STEP, TOKEN)] and refused(hub) == "session_lost"
    assert hub.peer_of(TOKEN) == b"peer" and hub.link_of(TOKEN).connections == {1}


def test_client_that_is_not_let_in_is_answered_and_nothing_else_is_done() -> None:
    hub = HubProtocol(HUB_ID)
    hub.refuse(b"peer", [head(Op.MAKE, 1, Make(1))], FAILURE)
    peer, found, body = answered(hub)
    assert (peer, found.op, found.token, found.seq) == (b"peer", REPLY | Op.FAILURE, TOKEN, 1)
    assert messages.unpack(Failure, body) == FAILURE and hub.refused == 1 and hub.peer_of(TOKEN) is None
    for frames in ([], [b"x"]):
        hub.refuse(b"peer", frames, FAILURE)
    assert hub.outgoing == [] and hub.malformed == 0


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.STEP, Op.RESET])
def test_message_has_so_many_frames_and_no_more(op: Op) -> None:
    hub = HubProtocol(HUB_ID)
    with_session(hub)
    message = Reset() if op is Op.RESET else None
    most = hub.receive(b"peer", 1, [head(op, 2, message), *[b""] * (FRAMES_MAX - 1)])
    assert most is not None and len(most.frames) == FRAMES_MAX - 1
    hub.answer(most, Done())
    hub.outgoing.clear()
    assert hub.receive(b"peer", 1, [head(op, 3, message), *[b""] * FRAMES_MAX]) is None
    assert refused(hub) == "malformed"


def stepped(hub: HubProtocol, connection: int = 1) -> bytes:
    """Have a session made and stepped; returns the first frame of its next step."""
    with_session(hub, connection)
    step = hub.receive(b"peer", connection, [head(Op.STEP, 2)])
    assert step is not None
    hub.answer(step, Done())
    hub.outgoing.clear()
    return head(Op.STEP, 3)


@pytest.mark.parametrize(("count", "taken"), [(FRAMES_MAX - 1, True), (FRAMES_MAX, False)])
def test_expected_step_has_so_many_frames_and_no_more(count: int, taken: bool) -> None:
    hub = HubProtocol(HUB_ID)
    assert (hub.receive_step(b"peer", stepped(hub), [b""] * count) is not None) is taken


@pytest.mark.parametrize(("connection", "taken"), [(-1, False), (0, True)])
def test_step_by_a_connection_that_nobody_knows_is_left_to_receive(connection: int, taken: bool) -> None:
    hub = HubProtocol(HUB_ID)
    assert (hub.receive_step(b"peer", stepped(hub, connection), []) is not None) is taken


def test_expected_step_runs_until_it_is_answered() -> None:
    hub = HubProtocol(HUB_ID)
    taken = hub.receive_step(b"peer", stepped(hub), [])
    assert taken is not None
    assert hub.receive(b"peer", 1, [head(Op.RESET, 4, Reset())]) is None
    assert "which runs" in messages.unpack(Failure, answered(hub)[2]).message
    assert hub.receive(b"peer", 1, [head(Op.STEP, 3)]) is None and hub.outgoing == [], "its reply is none of before"


def test_close_that_cannot_be_read_uses_up_its_number_where_nothing_runs() -> None:
    pair = joined()
    packet = Packet(pair.peer, pair.connection, [Prelude(Op.CLOSE, HUB_ID, TOKEN, 2).pack() + b"\xc1"])
    for _ in range(2):
        pair.to_hub.append(packet)
        assert pair.deliver_to_hub() is None
        assert Prelude.unpack(pair.to_client[0].frames[0]).op == REPLY | Op.FAILURE
        assert failure_in(pair.to_client.pop()).code == "malformed"
    assert pair.hub.replayed == 1 and pair.hub.malformed == 1


# --- what is remembered -----------------------------------------------------------------------------------------------


def test_lost_session_is_counted_only_if_it_was_made() -> None:
    hub = HubProtocol(HUB_ID)
    refused_make = hub.receive(b"peer", 1, [head(Op.MAKE, 1, Make(1), OTHER)])
    assert refused_make is not None
    hub.fail(refused_make, Failure("unknown_env", "request", "there is none"))
    hub.forget(OTHER)
    hub.outgoing.clear()
    for token in (OTHER, bytes(15) + b"\x01"):  # of a MAKE that was refused, and of none
        assert hub.receive(b"peer", 1, [head(Op.CLOSE, 2, Close(), token)]) is None and refused(hub) == "session_lost"
        hub.outgoing.clear()
    assert (hub.failures, hub.refused) == ({"unknown_env": 1}, 2)
    made = hub.receive(b"peer", 1, [head(Op.MAKE, 1, Make(1))])
    assert made is not None
    hub.answer(made, Done())
    hub.forget(TOKEN)
    hub.outgoing.clear()
    assert hub.receive(b"peer", 1, [head(Op.RESET, 2, Reset())]) is None and refused(hub) == "session_lost"
    assert hub.failures == {"unknown_env": 1, "session_lost": 1}


def test_takeover_is_admitted_where_there_are_as_many_sessions_as_may_be() -> None:
    hub = HubProtocol(HUB_ID, sessions_max=1)
    with_session(hub)
    assert hub.receive(b"peer", 1, [head(Op.MAKE, 1, Make(1, "x"), OTHER)]) is None and refused(hub) == "limit"
    assert hub.receive(b"peer", 1, [head(Op.ATTACH, 1, Attach(TOKEN), OTHER)]) is not None


def test_code_that_is_counted_goes_on_being_counted() -> None:
    hub = HubProtocol(HUB_ID)
    codes = ["x" * CODE_CHARS_MAX, "y" * (CODE_CHARS_MAX + 1), *map(str, range(CODES_MAX))]
    for code in (*codes, codes[0]):
        hub.refuse(b"peer", [head(Op.LIST, 1, Question(), NO_SESSION)], Failure(code, "hub", ""))
    assert hub.failures[codes[0]] == 2 and codes[1] not in hub.failures and len(hub.failures) == CODES_MAX


# --- connections and leases -------------------------------------------------------------------------------------------


def test_connections_are_those_that_a_session_was_heard_on_and_that_last() -> None:
    hub = HubProtocol(HUB_ID)
    with_session(hub, connection=4)
    assert hub.link_of(TOKEN).connections == {4} and hub.link_of(TOKEN).connection == 4
    assert hub.receive(b"again", 5, [head(Op.RESET, 2, Reset())]) is not None
    assert hub.link_of(TOKEN).connections == {4, 5} and hub.link_of(TOKEN).connection == 5
    assert hub.connection_ended(4) == [] and hub.link_of(TOKEN).connections == {5}
    assert hub.connection_ended(5) == [(TOKEN, b"again")] and hub.link_of(TOKEN).connections == set()
    assert hub.link_of(OTHER).connections == set() and hub.link_of(OTHER).connection == -1


def test_peer_is_a_sessions_while_its_client_is_there() -> None:
    hub = HubProtocol(HUB_ID, lease_s=60.0)
    with_session(hub)
    with_session(hub, token=OTHER)
    assert hub.peer_of(TOKEN) == b"peer" and hub.peer_of(bytes(15) + b"\x01") is None
    assert hub.sessions_of(b"peer") == [TOKEN, OTHER] and hub.sessions_of(b"another") == []
    hub.connection_lost(TOKEN, 100.0)
    assert hub.peer_of(TOKEN) is None and hub.sessions_of(b"peer") == [OTHER]
    hub.forget(TOKEN)
    assert hub.next_expiry_s() == math.inf and hub.leases == {}
    hub.forget(TOKEN)  # it is forgotten already


def test_pushes_go_to_the_peer_of_their_session() -> None:
    hub = HubProtocol(HUB_ID)
    hub.notice(TOKEN, "nobody's")
    hub.goodbye(TOKEN, FAILURE)
    assert hub.outgoing == []
    with_session(hub)
    hub.notice(TOKEN, "a text")
    peer, found, body = answered(hub)
    assert (peer, found[:4]) == (b"peer", (Op.NOTICE, HUB_ID, TOKEN, 0))
    assert messages.unpack(Notice, body).text == "a text"
    hub.goodbye(TOKEN, FAILURE)
    peer, found, body = answered(hub)
    assert (peer, found[:4]) == (b"peer", (Op.GOODBYE, HUB_ID, TOKEN, 0)) and messages.unpack(Failure, body) == FAILURE
