"""The client's half of the protocol: frames in, a reply and frames out.

``ClientProtocol`` holds one connection's pending request, asks after it while no answer comes, and never takes one
reply for another. A request that was given up may still run in the hub, which runs one at a time: the session's next
one is held back until the hub says that it has ended. That a request may have been sent is noted before it is sent, and
that it has ended only when the hub said so, so that an exception at any moment leaves no request that nobody knows of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from envhub.errors import RemoteProtocolError
from envhub.protocol import messages
from envhub.protocol.messages import REPLY, SESSION_OPS, Failure, HeartbeatReply, Op
from envhub.protocol.prelude import (
    AWAY_WARNING_S,
    HEARTBEAT_S,
    NO_SESSION,
    PRELUDE,
    RECONNECT_S,
    REFUSED_S,
    SILENCE_WARNING_S,
    Frame,
    Frames,
    Prelude,
    pack_head,
)
from envhub.values import codec

NOTICES_MAX = 16  # that are kept until somebody takes them away
_AT_ONCE = float("-inf")
_DONE = messages.Done()
_UNHELD = (Op.MAKE, Op.ATTACH, Op.CLOSE)  # the hub takes them whatever runs


class Reply(NamedTuple):
    """The answer to the pending request: ``message`` is a Failure, or the reply that belongs to ``op``."""

    op: Op
    message: Any
    frames: Sequence[Frame]


@dataclass
class _Pending:
    op: Op
    token: bytes
    seq: int
    frames: Frames
    done: bytes  # the first frame of a reply that says that it was done
    speak_s: float  # when to ask after it next
    held: bool = False  # it is not sent before a request that was given up has ended
    follows: bool = False  # it was held, and a late copy of what was given up may still come before it
    lost: bool = False  # the hub does not have it, or its reply went astray: send it again


class ClientProtocol:
    """The client's half: one connection, at most one pending request, at most one session.

    Attributes:
        hub_id: the hub's id, 0 until it is known.
        dropped: how many late or foreign replies were thrown away.
        progress: what the hub said last of the pending request, until somebody takes it away.
        answer: the reply to the last request, until the next one; an interrupt may keep it from who waits for it.
        goodbye: why the hub has ended the session, once it said so.
        notices: what the hub has for the user of the session to read, until somebody takes it away.
        reconnect_s: for how long the hub may be out of reach while a request is pending.
    """

    def __init__(self, token: bytes = NO_SESSION, reconnect_s: float = RECONNECT_S) -> None:
        self.hub_id = 0
        self.token = token
        self.dropped = 0
        self.progress: HeartbeatReply | None = None
        self.answer: Reply | None = None
        self.goodbye: Failure | None = None
        self.notices: list[str] = []
        self.reconnect_s = reconnect_s
        self._session_seq = 0
        self._sent_seq = 0  # of the session's last request that may have been sent
        self._ended_seq = 0  # of the session's last request that has ended, by a reply or by what the hub said of it
        self._ticket = 0
        self._pending: _Pending | None = None
        self._back = False  # whether the hub is to hear that the session's client is connected again
        self._heard_s: float | None = None
        self._away_since_s: float | None = None
        self._refused_since_s: float | None = None
        self._loss = ""

    @property
    def pending(self) -> Op | None:
        """The op of the request that waits for its reply."""
        return None if self._pending is None or self.answer is not None else self._pending.op

    @property
    def held(self) -> bool:
        """Whether the pending request is not to be sent yet: ``tick`` will."""
        return self._pending is not None and self._pending.held

    @property
    def unsettled(self) -> bool:
        """Whether the hub may still carry out a request of the session, the pending one or one that was given up."""
        return self._sent_seq > self._ended_seq

    def request(self, op: Op, message: Any, frames: Sequence[Frame], now_s: float) -> Frames:
        """The frames of a new request, which is pending from now on. ``Step`` and the arrays travel as they are.

        They are to be sent unless the request is ``held``.
        """
        if self._pending is not None and self.answer is None:
            raise RuntimeError(f"{self._pending.op.name} is pending")
        if op in SESSION_OPS:
            self._session_seq += 1
            token, seq = self.token, self._session_seq
        else:
            self._ticket += 1
            token, seq = NO_SESSION, self._ticket
        body = message.codes if op == Op.STEP else messages.pack(message)
        sent = [pack_head(op, self.hub_id, token, seq) + body, *frames]
        held = False
        if op in SESSION_OPS:
            held = self._sent_seq > self._ended_seq and op not in _UNHELD
            if not held:
                self._sent_seq = seq
        done = pack_head(REPLY | op, self.hub_id, token, seq)
        self.answer = None
        self._pending = _Pending(op, token, seq, sent, done, _AT_ONCE if held else now_s + HEARTBEAT_S, held, held)
        self._heard_s = now_s
        return sent

    def give_up(self) -> None:
        """Stop waiting for the pending request; its reply, should it come, is dropped."""
        self._pending = self.answer = None

    def receive(self, frames: Frames, now_s: float) -> Reply | None:
        """Take one message from the hub; returns the pending request's reply if this is it.

        Raises:
            RemoteProtocolError: the message is none of EnvHub's, or its content is malformed.
        """
        pending = self._pending
        if pending is not None and pending.op == Op.STEP and frames and frames[0] == pending.done:
            self._heard_s, self._away_since_s, self._refused_since_s = now_s, None, None
            return self._answered(pending, _DONE, frames)
        prelude = Prelude.unpack(frames[0] if frames else b"")
        self._heard_s, self._away_since_s, self._refused_since_s = now_s, None, None
        op = prelude.op & ~REPLY
        if self.hub_id and prelude.hub_id != self.hub_id:
            self._loss = "another hub answers at its address"
            return None
        body = memoryview(frames[0])[PRELUDE.size :]
        if op == Op.GOODBYE and prelude.token == self.token:
            self.goodbye = _read(Op.FAILURE, body)
            self._loss = self.goodbye.message
            return None
        if op == Op.NOTICE and prelude.token == self.token and not prelude.op & REPLY:
            self.notices.append(_read(Op.NOTICE, body).text)
            del self.notices[:-NOTICES_MAX]
            return None
        if pending is None or (prelude.token, prelude.seq) != (pending.token, pending.seq) or not prelude.op & REPLY:
            self._drop(prelude, body)
            return None
        if op == Op.HEARTBEAT:
            self._heartbeat(pending, body)
            return None
        if op not in (pending.op, Op.FAILURE):
            raise RemoteProtocolError(f"a reply with op {op} to a {pending.op.name}")
        kind = messages.REPLIES[op]
        message = kind() if kind is messages.Done else _read(op, body)
        if pending.follows and isinstance(message, Failure) and message.code == "bad_seq":
            pending.lost = True  # what was given up has come after all, and runs: it is tried again at the next tick
            return None
        if op == Op.HELLO:
            self.hub_id = prelude.hub_id
        return self._answered(pending, message, frames)

    def _answered(self, pending: _Pending, message: Any, frames: Frames) -> Reply:
        self.answer = answer = Reply(pending.op, message, frames[1:])
        if pending.op in SESSION_OPS:
            self._ended_seq = pending.seq
        self._pending = None
        return answer

    def _heartbeat(self, pending: _Pending, body: Frame) -> None:
        found = _read(Op.HEARTBEAT, body)
        self.progress = found if found.phase else None
        if found.state != "running":
            pending.lost, pending.speak_s = True, _AT_ONCE

    def _drop(self, prelude: Prelude, body: Frame) -> None:
        """Throw a message away, unless it tells of the request that was given up."""
        given_up = self.unsettled and (prelude.token, prelude.seq) == (self.token, self._sent_seq)
        if not given_up or not prelude.op & REPLY:
            self.dropped += 1
            return
        if prelude.op != REPLY | Op.HEARTBEAT:
            self.dropped += 1  # its reply, for which nobody waits
        elif _read(Op.HEARTBEAT, body).state == "running":
            return
        self._ended_seq = self._sent_seq
        if self._pending is not None and self._pending.held:
            self._sent_seq = self._pending.seq
            self._pending.held, self._pending.lost, self._pending.speak_s = False, True, _AT_ONCE

    def tick(self, now_s: float) -> list[Frames]:
        """What to send now: the pending request once more, or a question after it."""
        pending = self._pending
        if pending is None:
            back, self._back = self._back, False
            return [self._question(self.token, self._session_seq)] if back else []
        if now_s < pending.speak_s:
            return []
        pending.speak_s = now_s + HEARTBEAT_S
        self._back = self._back and pending.token == NO_SESSION
        if pending.held:
            return [self._question(pending.token, self._sent_seq)]
        if pending.lost or pending.token == NO_SESSION:
            pending.lost = False
            return [pending.frames]
        return [self._question(pending.token, pending.seq)]

    def _question(self, token: bytes, seq: int) -> Frames:
        return [pack_head(Op.HEARTBEAT, self.hub_id, token, seq) + messages.pack(messages.HeartbeatRequest())]

    def next_tick_s(self, now_s: float) -> float:
        """How many seconds from now ``tick`` or ``trouble`` has something to say, at the latest."""
        next_s = now_s + HEARTBEAT_S
        if self._pending is not None:
            next_s = min(next_s, self._pending.speak_s)
        for since_s, warning_s in ((self._away_since_s, AWAY_WARNING_S), (self._heard_s, SILENCE_WARNING_S)):
            if since_s is not None and since_s + warning_s > now_s:
                next_s = min(next_s, since_s + warning_s)
        return max(0.0, next_s - now_s)

    # --- the transport ----------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """The transport is connected (again): the next tick asks after the pending request at once.

        Where none is pending it tells the hub all the same, which otherwise would not know whose connection it is.
        """
        self._away_since_s = self._refused_since_s = None
        self._back = self._session_seq > 0
        if self._pending is not None:
            self._pending.speak_s = _AT_ONCE

    def disconnected(self, now_s: float) -> None:
        """The transport's connection ended; it reconnects by itself."""
        if self._away_since_s is None:
            self._away_since_s = now_s

    def refused(self, now_s: float) -> None:
        """An attempt to connect was refused: somebody is there, and it is no hub."""
        if self._refused_since_s is None:
            self._refused_since_s = now_s

    def lost(self, why: str) -> None:
        """Somebody proved that the hub is gone."""
        self._loss = self._loss or why

    @property
    def is_refused(self) -> bool:
        """Whether a hub that was there before refuses connections, and is lost once it did so for ``REFUSED_S``."""
        return self._refused_since_s is not None and bool(self.hub_id)

    def trouble(self, now_s: float) -> str:
        """What keeps the hub from being heard, once that has lasted long enough to be told; else an empty string."""
        if self._away_since_s is not None and now_s - self._away_since_s >= AWAY_WARNING_S:
            return "the connection to it is lost" + (", and others are refused" if self.is_refused else "")
        if self._pending is not None and self._heard_s is not None and now_s - self._heard_s >= SILENCE_WARNING_S:
            return f"it has been silent for {SILENCE_WARNING_S:g} s"
        return ""

    def loss(self, now_s: float) -> str:
        """Why the hub must be taken for lost, or an empty string."""
        if self._loss or not self.hub_id:  # a hub not met yet may still be starting: the caller's timeout decides
            return self._loss
        if self._refused_since_s is not None and now_s - self._refused_since_s >= REFUSED_S:
            return f"connections to its address were refused for {REFUSED_S:.0f} s"
        if self._pending is None or self._heard_s is None:
            return ""
        # A request counts as having been heard when it was made: it has all of the time, however long nothing came.
        since_s = self._heard_s if self._away_since_s is None else max(self._heard_s, self._away_since_s)
        if now_s - since_s >= self.reconnect_s:
            return f"it has not been reachable for reconnect_timeout={self.reconnect_s:g} s"
        return ""


def _read(op: int, body: Frame) -> Any:
    try:
        return messages.unpack(messages.REPLIES[op], body)
    except codec.DecodeError as error:
        raise RemoteProtocolError(f"a malformed {Op(op).name} reply: {error}") from error
