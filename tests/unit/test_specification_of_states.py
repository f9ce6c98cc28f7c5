"""PROTOCOL.md says what both halves do: its tables of states and events, its diagrams, and what a client does next."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from envhub_client.connection.failures import raise_failure
from protocol_document import diagram, marked, table, tables
from protocol_pair import HUB_ID, SESSION_REQUESTS, TOKEN, ProtocolPair, failure_in, joined, step_on_its_way

from envhub import errors
from envhub.protocol import messages
from envhub.protocol.client import CUTS_MAX, HEARTBEAT_S
from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import (
    REPLY,
    Attach,
    Close,
    Failure,
    HeartbeatReply,
    Make,
    Op,
    Question,
    Receive,
    Reset,
    Send,
)
from envhub.protocol.prelude import NO_SESSION, Prelude

REQUESTS = {**SESSION_REQUESTS, Op.MAKE: Make(2, "CartPole-v1"), Op.ATTACH: Attach(bytes(16))}
REQUESTS[Op.SEND] = Send([1], b"", min_envs=1)

# --- a token at the hub -----------------------------------------------------------------------------------------------


def not_there() -> ProtocolPair:
    pair = ProtocolPair()
    pair.hello()
    return pair


def running() -> ProtocolPair:
    """A hub that runs request 3 of the session."""
    pair = joined()
    pair.step(b"left")
    step_on_its_way(pair)
    pair.deliver_to_hub()
    return pair


def receiving() -> ProtocolPair:
    """A hub that runs request 3 of the session, a RECEIVE."""
    pair = joined()
    pair.step(b"left")
    pair.request(Op.RECEIVE, Receive(1))
    pair.deliver_to_hub()
    return pair


def idle() -> ProtocolPair:
    """A hub that has answered request 3."""
    pair = running()
    pair.finish()
    pair.to_client.clear()
    return pair


def ended() -> ProtocolPair:
    """A hub whose session has ended with request 3, a CLOSE."""
    pair = joined()
    pair.step(b"left")
    pair.request(Op.CLOSE, Close())
    pair.deliver_to_hub()
    pair.finish()
    pair.to_client.clear()
    return pair


STATES = {"not there": not_there, "running n": running, "idle, n answered": idle, "ended with n": ended}
N = 3


def state(pair: ProtocolPair) -> str:
    """The state of the token, as the diagram calls it."""
    link = pair.hub._links.get(TOKEN)
    if link is not None:
        return "running n" if link.running else "idle, n answered"
    return "ended with n" if TOKEN in {**pair.hub._ended, **pair.hub._closed_early} else "not there"


def does(pair: ProtocolPair, op: Op, seq: int) -> str:
    """What the hub does at a request, in the words of the table."""
    codes = b"\x04" if op is Op.STEP else messages.pack(REQUESTS[op])
    incoming = pair.hub.receive(pair.peer, pair.connection, [Prelude(op, HUB_ID, TOKEN, seq).pack() + codes])
    pair.collect()
    if incoming is not None:
        pair.running = incoming
        return "runs it"
    if not pair.to_client:
        return "answers nothing now"
    sent = pair.to_client.pop()
    found = Prelude.unpack(sent.frames[0])
    return f"refuses it: {failure_in(sent).code}" if found.op == REPLY | Op.FAILURE else "sends the reply to n again"


# By the table's words, the requests that they mean.
MEANT: dict[tuple[str, str], list[tuple[Op, int]]] = {
    ("not there", "MAKE, ATTACH"): [(Op.MAKE, 1), (Op.ATTACH, 1)],
    ("not there", "CLOSE with seq n"): [(Op.CLOSE, 1), (Op.CLOSE, N)],
    ("not there", "any other"): [(Op.STEP, 1), (Op.RESET, N), (Op.CALL, N)],
    ("running request n", "seq n"): [(Op.STEP, N)],
    ("running request n", "CLOSE with a seq over n"): [(Op.CLOSE, N + 1), (Op.CLOSE, N + 7)],
    ("running request n", "one in the window, as n is"): [(Op.SEND, N + 1), (Op.SEND, N + 3)],
    ("running request n", "any other"): [(Op.STEP, N + 1), (Op.STEP, N - 1), (Op.CLOSE, N - 1), (Op.MAKE, N + 1)],
    ("idle, n answered", "seq n"): [(Op.STEP, N)],
    ("idle, n answered", "seq over n, neither MAKE nor ATTACH"): [(Op.STEP, N + 1), (Op.RESET, N + 7)],
    ("idle, n answered", "any other"): [(Op.STEP, N - 1), (Op.MAKE, N + 1), (Op.ATTACH, N + 1)],
    ("ended with n", "seq n, and the reply to n had no frames but its first"): [(Op.CLOSE, N)],
    ("ended with n", "MAKE or ATTACH with a seq over n"): [(Op.MAKE, N + 1), (Op.ATTACH, N + 7)],
    ("ended with n", "any other"): [(Op.MAKE, N - 1), (Op.STEP, N + 1), (Op.CLOSE, N + 1)],
}


def rules_of_hub() -> dict[tuple[str, str], str]:
    """What the document says that the hub does, by state and request."""
    (rows,) = tables("Exactly once")
    found, of = {}, ""
    for row in rows:
        of = row[0] or of
        found[of, row[1].replace("`", "")] = row[2].replace("`", "")
    return found


@pytest.mark.parametrize("rule", MEANT, ids=": ".join)
def test_hub_does_with_a_request_in_a_state_what_the_table_says(rule: tuple[str, str]) -> None:
    of, _ = rule
    said = rules_of_hub()[rule]
    for op, seq in MEANT[rule]:
        pair = receiving() if op is Op.SEND else STATES[of.replace("running request", "running")]()
        assert said.startswith(does(pair, op, seq)), (op, seq)


def test_table_of_states_and_requests_has_these_rules() -> None:
    assert rules_of_hub().keys() == MEANT.keys()


def stops(pair: ProtocolPair) -> None:
    pair.hub.draining, pair.hub.stopping = SHUTTING_DOWN, True
    pair.hub.forget(TOKEN)


# By an edge of the diagram, as state, what happens and state, how to make it happen.
EDGES_OF_TOKEN: dict[tuple[str, str, str], Callable[[ProtocolPair], object]] = {
    ("not there", "MAKE, ATTACH", "running n"): lambda pair: does(pair, Op.MAKE, 1),
    ("running n", "the reply", "idle, n answered"): lambda pair: pair.finish(),
    ("idle, n answered", "a seq over n", "running n"): lambda pair: does(pair, Op.STEP, N + 1),
    ("running n", "the reply to CLOSE,", "ended with n"): lambda pair: (does(pair, Op.CLOSE, N + 1), pair.finish()),
    ("idle, n answered", "the lease is over, the hub", "ended with n"): stops,
    ("ended with n", "MAKE, ATTACH with a seq m over n", "running m"): lambda pair: does(pair, Op.MAKE, N + 1),
}


@pytest.mark.parametrize("edge", EDGES_OF_TOKEN, ids=" ".join)
def test_token_goes_from_state_to_state_as_the_diagram_says(edge: tuple[str, str, str]) -> None:
    before, happens, after = edge
    assert before in diagram("Exactly once") and after in diagram("Exactly once") and happens in diagram("Exactly once")
    pair = STATES[before]()
    assert state(pair) == before
    EDGES_OF_TOKEN[edge](pair)
    assert state(pair) == after.replace("m", "n")


def words_of(drawn: str) -> list[str]:
    """The texts of a diagram, without its lines and arrows."""
    texts = [re.split(r"\s{2,}", re.sub(r"[-+|^v<>]{2,}|[|^<>+]| v ?$", "  ", line)) for line in drawn.splitlines()]
    return [text.strip(" -") for line in texts for text in line if text.strip(" -v")]


def test_diagram_of_a_token_has_these_states_and_edges() -> None:
    drawn = {*words_of(diagram("Exactly once"))}
    more = {"or to a MAKE that failed", "stops, another client attaches"}  # second lines of two edges
    assert drawn == more | {text for edge in EDGES_OF_TOKEN for text in edge}


# --- a request at the client ------------------------------------------------------------------------------------------


def pending() -> ProtocolPair:
    """A client that waits for the reply to a step, of which the hub has heard."""
    pair = joined()
    step_on_its_way(pair)
    pair.deliver_to_hub()
    return pair


def told(pair: ProtocolPair, state: str) -> Any:
    """Give the client a HEARTBEAT reply about its last request."""
    head = Prelude(REPLY | Op.HEARTBEAT, HUB_ID, TOKEN, pair.client.last_seq).pack()
    return pair.client.receive([head + messages.pack(HeartbeatReply(state))], pair.now_s)


def sent_after(pair: ProtocolPair, seconds: float) -> list[int]:
    """The ops that the client sends within these seconds."""
    pair.to_hub.clear()
    pair.advance(seconds)
    return [Prelude.unpack(packet.frames[0]).op for packet in pair.to_hub]


def on_reply() -> None:
    pair = pending()
    pair.finish()
    assert pair.deliver_to_client() is not None and pair.client.pending is None
    pair = pending()
    with pytest.raises(errors.RemoteProtocolError):
        pair.client.receive([Prelude(REPLY | Op.RESET, HUB_ID, TOKEN, 2).pack()], pair.now_s)


def on_running() -> None:
    pair = pending()
    assert told(pair, "running") is None and sent_after(pair, 0) == [] and pair.pending is Op.STEP


def on_unknown_or_answered() -> None:
    for word in ("unknown", "answered"):
        pair = pending()
        sent = pair.client.pending.frames if pair.client.pending else []
        assert told(pair, word) is None and pair.client.tick(pair.now_s) == [sent]


def on_silence() -> None:
    assert sent_after(pending(), HEARTBEAT_S - 0.01) == []
    assert sent_after(pending(), HEARTBEAT_S) == [Op.HEARTBEAT]
    pair = joined()
    pair.request(Op.LIST, Question())
    assert sent_after(pair, HEARTBEAT_S) == [Op.LIST]


def on_connection() -> None:
    pair = pending()
    pair.disconnect()
    pair.reconnect()
    assert sent_after(pair, 0) == [Op.HEARTBEAT]


def on_cuts() -> None:
    pair = pending()
    for _ in range(CUTS_MAX):
        assert pair.client.cut_off is None
        pair.disconnect()
        pair.reconnect()
        told(pair, "unknown")
        pair.advance(0)
    assert pair.client.cut_off is Op.STEP
    told(pair, "running")
    assert pair.client.cut_off is None


def on_any_other() -> None:
    pair = pending()
    for op, token, seq in [
        (REPLY | Op.STEP, TOKEN, 3),
        (REPLY | Op.STEP, NO_SESSION, 2),
        (70, TOKEN, 2),
        (Op.PING, NO_SESSION, 0),
    ]:
        assert pair.client.receive([Prelude(op, HUB_ID, token, seq).pack() + b"\x80"], pair.now_s) is None
    assert pair.pending is Op.STEP and sent_after(pair, 0) == []


EVENTS = {
    "its reply arrives": on_reply,
    "HEARTBEAT reply `running`": on_running,
    "HEARTBEAT reply `unknown` or `answered`": on_unknown_or_answered,
    "1 s without having sent anything": on_silence,
    "a connection is made (again)": on_connection,
    f"the connection has ended {CUTS_MAX} times in a row": on_cuts,
    "any other message arrives": on_any_other,
}


@pytest.mark.parametrize("event", EVENTS)
def test_client_does_at_an_event_what_the_table_says(event: str) -> None:
    EVENTS[event]()


def test_table_of_a_clients_events_has_these() -> None:
    (rows,) = tables("The client's part")
    assert [next(event for event in EVENTS if row[0].startswith(event)) for row in rows] == [*EVENTS]


def client_state(pair: ProtocolPair) -> str:
    """The state of the client's last request, as the diagram calls it."""
    if pair.client.pending is not None:
        return "pending n"
    return "given up n" if pair.client.unsettled else "idle"


def gave_up() -> ProtocolPair:
    pair = pending()
    pair.client.give_up()
    return pair


def answer(pair: ProtocolPair) -> None:
    pair.finish()
    pair.deliver_to_client()


CLIENT_STATES = {"idle": joined, "pending n": pending, "given up n": gave_up}
EDGES_OF_REQUEST: dict[tuple[str, str, str], list[Callable[[ProtocolPair], object]]] = {
    ("idle", "send", "pending n"): [step_on_its_way],
    ("pending n", "its reply", "idle"): [answer],
    ("pending n", "given up", "given up n"): [lambda pair: pair.client.give_up()],
    ("given up n", "HEARTBEAT reply unknown or answered, or the reply to n", "idle"): [
        lambda pair: told(pair, "unknown"),
        lambda pair: told(pair, "answered"),
        answer,
    ],
    ("pending n", "1 s, or connected again: send HEARTBEAT", "pending n"): [
        lambda pair: sent_after(pair, HEARTBEAT_S) == [Op.HEARTBEAT],
        lambda pair: (pair.disconnect(), pair.reconnect(), sent_after(pair, 0) == [Op.HEARTBEAT])[-1],
    ],
    ("pending n", "HEARTBEAT reply unknown or answered: send n again", "pending n"): [
        lambda pair: (told(pair, "unknown"), sent_after(pair, 0) == [Op.STEP])[-1],
        lambda pair: (told(pair, "answered"), sent_after(pair, 0) == [Op.STEP])[-1],
    ],
    ("given up n", "1 s, or connected again: send HEARTBEAT", "given up n"): [
        lambda pair: (pair.disconnect(), pair.reconnect(), sent_after(pair, 0) == [Op.HEARTBEAT])[-1]
    ],
}


@pytest.mark.parametrize("edge", EDGES_OF_REQUEST, ids=" ".join)
def test_request_goes_from_state_to_state_as_the_diagram_says(edge: tuple[str, str, str]) -> None:
    before, _, after = edge
    for happen in EDGES_OF_REQUEST[edge]:
        pair = CLIENT_STATES[before]()
        assert client_state(pair) == before
        assert happen(pair) is not False and client_state(pair) == after


def test_diagram_of_a_request_has_these_states_and_edges() -> None:
    drawn = {text.strip("()") for text in words_of(diagram("The client's part"))}
    assert drawn == {text for edge in EDGES_OF_REQUEST for text in edge}


def test_request_that_is_held_asks_after_the_one_that_was_given_up_each_second() -> None:
    pair = gave_up()
    pair.request(Op.RESET, Reset())
    assert pair.holds and sent_after(pair, 0) == [Op.HEARTBEAT] and sent_after(pair, HEARTBEAT_S) == [Op.HEARTBEAT]


# --- failures ---------------------------------------------------------------------------------------------------------

# By what the document says that a client does, the error that tells its user so.
NEXT: dict[str, type[errors.EnvHubError]] = {
    "ends: the older side is upgraded": errors.VersionMismatch,
    "takes the hub for lost": errors.HubLost,
    "is wrong": errors.LocalProtocolError,
    "after it gave a request up: sends the same message again every second": errors.LocalProtocolError,
    "makes another session; after CLOSE, nothing": errors.SessionLost,
    "asks for less, or waits": errors.RequestRefused,
    "asks for what it may have": errors.RequestRefused,
    "asks its operator": errors.AccessDenied,
    "tries later": errors.RequestRefused,
    "sends LIST": errors.RequestRefused,
    "corrects the request": errors.RequestRefused,
    "corrects the actions": errors.SpaceMismatch,
    "corrects the arguments, or the env": errors.EnvRaised,
    "goes on, or closes the session": errors.EnvRaised,
    "goes on: the envs are built again": errors.WorkerDied,
    "goes on likewise": errors.EnvTimeout,
    "goes on without it": errors.SnapshotRefused,
    "drops some": errors.SnapshotLimit,
    "takes another": errors.SnapshotLost,
    "makes another session, and reports the bug": errors.SessionLost,
    "closes the session, and reports the bug": errors.RequestRefused,
    "closes the session": errors.RestartsExhausted,
}


def error_of(code: str, scope: str) -> type[BaseException]:
    """The class of the error that a failure is raised as."""
    with pytest.raises(errors.EnvHubError) as raised:
        raise_failure(Failure(code, scope, "why"), "tcp://127.0.0.1:1")
    return raised.type


def test_client_does_after_a_failure_what_the_table_says() -> None:
    used = set()
    for code, scopes, _, does_next in table("Failure codes"):
        phrase = next((phrase for phrase in NEXT if does_next.startswith(phrase)), "")
        used.add(phrase)
        for scope in scopes.split(","):
            assert error_of(code, scope.strip(" `")) is NEXT[phrase], code
    assert used == NEXT.keys()


def test_code_that_is_not_known_is_a_refusal() -> None:
    assert error_of("code_of_a_later_version", "request") is errors.RequestRefused


def test_client_takes_a_hub_for_lost_that_is_another() -> None:
    pair = pending()
    stale = Prelude(REPLY | Op.FAILURE, HUB_ID + 1, TOKEN, 2).pack()
    pair.client.receive([stale + messages.pack(Failure("stale_hub", "hub", "another hub"))], pair.now_s)
    assert pair.client.loss(pair.now_s)


def test_codes_named_in_the_document_are_in_the_table() -> None:
    codes = {row[0] for row in table("Failure codes")}
    (rows,) = tables("Limits")
    assert {word for row in rows for word in marked(row[2])} <= codes
