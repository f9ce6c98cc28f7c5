"""Clients with keys of every right that try what is forbidden: each attempt is refused, and changes nothing.

That it changed nothing is what the trainers' checkers find; and an intruder is told nothing that it did not ask for.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import zmq

from envhub.protocol import messages
from envhub.protocol.messages import REPLY, Failure, HeartbeatReply, Hello, Op
from envhub.protocol.prelude import NO_SESSION, PRELUDE, Prelude
from envhub.transport import sockets
from envhub.transport.address import parse

ANSWER_MS = 5000
CONNECTIONS_MAX = 2  # the quota of every intruder
SEQS = (1, 2, 1 << 40)  # a session's first number, a used one, and one that follows any
REFUSALS = ("session_lost", "not_permitted")
BODIES = {
    Op.STEP: b"\x04",
    Op.RESET: messages.pack(messages.Reset()),
    Op.CALL: messages.pack(messages.Call("render", b"")),
    Op.COLLECT: messages.pack(messages.Collect([])),
    Op.CLOSE: messages.pack(messages.Close(True)),
}


class Unanswered(Exception):
    """The hub does not answer now, which is another's business."""


class Intruder:
    """One connection with a key."""

    def __init__(self, address: str, context: zmq.Context[Any]) -> None:
        place = parse(address)
        assert place.keys is not None
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        sockets.present_keys(self._socket, place.keys)
        self._socket.connect(place.text)
        self._hub_id = 0
        self._ticket = 0
        self.told_unasked: list[str] = []

    def greet(self) -> str:
        """Say hello; returns why the client is refused, if it is."""
        failure = self.failure(Op.HELLO, messages.pack(Hello()))
        return "" if failure is None else failure.message

    def ask(self, op: Op, body: bytes, token: bytes = NO_SESSION, seq: int = 0) -> tuple[Prelude, bytes]:
        """The prelude and the body of the answer; of a question of no session, ``seq`` is the next one.

        Raises:
            Unanswered: there is none.
        """
        if not seq:
            self._ticket += 1
            seq = self._ticket
        self._socket.send_multipart([Prelude(op, self._hub_id, token, seq).pack() + body])
        while self._socket.poll(ANSWER_MS):
            first, *_ = self._socket.recv_multipart()
            found = Prelude.unpack(first)
            if found.op & REPLY and (found.token, found.seq) == (token, seq):
                self._hub_id = found.hub_id
                return found, first[PRELUDE.size :]
            if found.token != NO_SESSION:
                self.told_unasked.append(f"op {found.op} of session {found.token.hex()[:8]}, number {found.seq}")
        raise Unanswered(f"{op.name} was not answered")

    def failure(self, op: Op, body: bytes, token: bytes = NO_SESSION, seq: int = 0) -> Failure | None:
        """The failure that is the answer, if it is one."""
        found, answer = self.ask(op, body, token, seq)
        return messages.unpack(Failure, answer) if found.op == REPLY | Op.FAILURE else None


def attempts(right: str, found: Intruder, token: bytes) -> Iterator[str]:
    """What was not refused, of all that a client of this right tries with the session of another one."""
    for seq in SEQS:
        _, body = found.ask(Op.HEARTBEAT, messages.pack(messages.Question()), token, seq)
        state = messages.unpack(HeartbeatReply, body).state
        if state != "unknown":
            yield f"HEARTBEAT {seq}: {state}"
        for op, asked in BODIES.items():
            yield from _unrefused(found, op, asked, token, seq)
    if right == "admin":
        return  # who may see and take over all sessions, and use none of another's before that
    yield from _unrefused(found, Op.OBSERVE, messages.pack(messages.Observe(token)))
    yield from _unrefused(found, Op.ATTACH, messages.pack(messages.Attach(token)), secrets.token_bytes(16), 1)
    _, body = found.ask(Op.SESSIONS, messages.pack(messages.Question()))
    if rows := messages.unpack(messages.Table, body).rows:
        yield f"SESSIONS: {rows}"
    if right == "observe":
        yield from _unrefused(found, Op.MAKE, messages.pack(messages.Make(1, "chain")), secrets.token_bytes(16), 1)


def _unrefused(found: Intruder, op: Op, body: bytes, token: bytes = NO_SESSION, seq: int = 0) -> Iterator[str]:
    failure = found.failure(op, body, token, seq)
    if failure is None or failure.code not in REFUSALS:
        yield f"{op.name} {seq}: {failure}"


def meddle(addresses: Mapping[str, str], tokens: Callable[[], Sequence[bytes]]) -> list[str]:
    """What was not refused of what clients with these keys, by their right, tried with the sessions of others.

    Raises:
        Unanswered: the hub does not answer.
    """
    wrong: list[str] = []
    with contextlib.ExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        for right, address in addresses.items():
            found = [Intruder(address, context) for _ in range(CONNECTIONS_MAX + 1)]
            refusals = [each.greet() for each in found]
            if "connections_max" not in refusals[-1] or any(refusals[:-1]):
                wrong.append(f"a key to {right} has connections_max={CONNECTIONS_MAX}, and connected so: {refusals}")
            for token in tokens():
                wrong += [f"a key to {right} was not refused {text}" for text in attempts(right, found[0], token)]
            wrong += [f"a key to {right} was told {text}" for each in found for text in each.told_unasked]
    return wrong
