"""The client's half of the protocol: frames in, a reply and frames out.

``ClientProtocol`` holds one connection's pending request, asks the hub about it while no reply comes, and never takes
one reply for another. The hub runs one request of a session at a time: while an abandoned one may run, the next one is
held. That a request may have been sent is recorded before it is sent, and its end only when the hub reports it, so that
an exception at any moment leaves no unknown request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from envhub.errors import RemoteProtocolError, printable
from envhub.protocol import messages, validation
from envhub.protocol.messages import REPLY, SESSION_OPS, Failure, HeartbeatReply, Op
from envhub.protocol.prelude import (
    AWAY_WARNING_S,
    CUTS_MAX,
    FRAME_BYTES_MAX,
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

NOTICES_MAX = 16  # of one connection: a hub that sends more would fill its clients' logs
STOPPED_S = 3 * HEARTBEAT_S  # a longer time between two calls of ``looked`` shows that the program did not run
_AT_ONCE = -math.inf
_DONE = messages.Done()
_TO_RECEIVE = (REPLY | Op.RECEIVE, REPLY | Op.FAILURE)
_NEVER_HELD = (Op.MAKE, Op.ATTACH, Op.CLOSE)  # the hub accepts them while another request runs


class Reply(NamedTuple):
    """The reply to the pending request; ``received``: that to the RECEIVE which a SEND ended, if there was one."""

    op: Op
    message: Any
    frames: Sequence[Frame]
    received: Reply | None = None


class FrameTooLarge(ValueError):
    """A request has a frame of ``nbytes``, more than the hub accepts; the request was not begun."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


@dataclass
class _Pending:
    op: Op
    token: bytes
    seq: int
    frames: Frames
    done: bytes  # the first frame of the request's Done reply
    ask_s: float  # time of the next HEARTBEAT about this request
    held: bool = False  # not sent until an abandoned request has ended
    lost: bool = False  # the hub does not have the request, or its reply was lost: send it again
    on_its_way: bool = False  # whether it was sent on this connection, or will be sent on the next one
    cuts: int = 0  # consecutive connections that ended after the request was sent on them
    ended_seq: int = 0  # of the RECEIVE that this SEND ends


class ClientProtocol:
    """The client's half: one connection, at most one pending request, at most one session."""

    def __init__(self, token: bytes = NO_SESSION, reconnect_s: float = RECONNECT_S) -> None:
        self.hub_id = 0  # until the hub has answered HELLO
        self.token = token
        self.progress: HeartbeatReply | None = None  # of the pending request; the caller resets it to None
        self.answer: Reply | None = None  # the reply to the last request; it survives an interrupt of the caller
        self.goodbye: Failure | None = None  # the reason why the hub ended the session, from its GOODBYE
        self.obstacle = ""  # what keeps connections from being usable, for the user; empty where they were
        self.notices: list[str] = []  # texts for the user; the caller clears the list
        self.frame_bytes_max = FRAME_BYTES_MAX  # of a request
        self.reconnect_s = reconnect_s  # longest time without a reachable hub while a request is pending
        self._notices_left = NOTICES_MAX
        self._session_seq = 0
        self._sent_seq = 0  # seq of the session's last request that may have been sent
        self._may_be_late = False  # whether the hub may still start a copy of an abandoned request
        self._ended_seq = 0  # seq of the session's last ended request, from a reply or a HEARTBEAT reply
        self._ticket = 0
        self._pending: _Pending | None = None
        self._reconnected = False  # whether the hub must learn which session the new connection belongs to
        self._heard_s: float | None = None
        self._unanswered_since_s: float | None = None  # of the first request since the hub was heard last
        self._away_since_s: float | None = None
        self._refused_since_s: float | None = None
        self._refused_s = -math.inf  # when one was refused last
        self._looked_s = -math.inf  # time of the last ``looked``
        self._loss = ""

    @property
    def pending(self) -> Op | None:
        return None if self._pending is None or self.answer is not None else self._pending.op

    @property
    def last_seq(self) -> int:
        return self._ended_seq if self._pending is None else self._pending.seq

    @property
    def may_have_session(self) -> bool:
        return self._session_seq > 0

    @property
    def held(self) -> bool:
        return self._pending is not None and self._pending.held

    @property
    def unsettled(self) -> bool:
        """True if the hub may still execute a request of the session: the pending one, or an abandoned one."""
        return self._sent_seq > self._ended_seq

    def request(self, op: Op, message: Any, frames: Sequence[Frame], now_s: float) -> Frames:
        """Begin a request; return its frames, to be sent unless it is ``held``. Raises ``FrameTooLarge``."""
        ended = self._pending if self.answer is None else None
        if ended is not None and not self.may_begin(op, message):
            raise RuntimeError(f"{ended.op.name} is pending")
        of_session = op in SESSION_OPS
        token, seq = (self.token, self._session_seq + 1) if of_session else (NO_SESSION, self._ticket + 1)
        body = message.codes if op == Op.STEP else messages.pack(message)
        sent = [pack_head(op, self.hub_id, token, seq) + body, *frames]
        if (nbytes := max(map(len, sent))) > self.frame_bytes_max:
            raise FrameTooLarge(nbytes)
        unsettled = self._sent_seq > self._ended_seq if ended is None else ended.held
        held = of_session and unsettled and op not in _NEVER_HELD
        done = pack_head(REPLY | op, self.hub_id, token, seq)
        ask_s = _AT_ONCE if held else now_s + HEARTBEAT_S
        ended_seq = 0 if ended is None else ended.seq
        pending = _Pending(op, token, seq, sent, done, ask_s, held, on_its_way=not held, ended_seq=ended_seq)
        session_seq, ticket = (seq, self._ticket) if of_session else (self._session_seq, seq)
        sent_seq = seq if of_session and not held else self._sent_seq
        self._heard_s = now_s
        if op == Op.CLOSE:
            self._notices_left = NOTICES_MAX  # what it says of the end is shown, whatever it has said before
        if self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        numbers = session_seq, ticket, sent_seq
        # In one statement without a call, so that no interrupt comes in between: the request has begun, or it has not.
        self.answer, self._pending, (self._session_seq, self._ticket, self._sent_seq) = None, pending, numbers
        return sent

    def may_begin(self, op: Op, message: Any) -> bool:
        pending = self.pending
        return pending is None or (pending is Op.RECEIVE and op is Op.SEND and message.ends_receive)

    def give_up(self) -> None:
        self._may_be_late = self._may_be_late or (self._pending is not None and self._pending.op in SESSION_OPS)
        self._pending = self.answer = None

    def receive(self, frames: Frames, now_s: float) -> Reply | None:
        """Process one message; return it if it is the pending request's reply. Raises ``RemoteProtocolError``."""
        pending = self._pending
        if pending is not None and pending.op == Op.STEP and frames and frames[0] == pending.done:
            self._heard_s = now_s  # inline: each step comes here
            self._unanswered_since_s = self._away_since_s = self._refused_since_s = None
            return self._answered(pending, _DONE, frames)
        prelude = Prelude.unpack(frames[0] if frames else b"")
        self._heard_s = now_s
        self._unanswered_since_s = self._away_since_s = self._refused_since_s = None
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
            if self._notices_left > 0:
                self._notices_left -= 1
                self.notices.append(_read(Op.NOTICE, body).text)
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
        if self._may_be_late and isinstance(message, Failure) and message.code == "bad_seq":
            pending.lost = True  # a copy of an abandoned request runs; the next tick sends this request again
            return None
        if isinstance(message, Failure) and message.code == "session_lost" and pending.op in SESSION_OPS:
            self.goodbye, self._loss = message, message.message  # nothing is to be asked of it any more
        if op == Op.HELLO:
            if not prelude.hub_id:
                raise RemoteProtocolError("a hub id of 0")
            self.hub_id = prelude.hub_id
        return self._answered(pending, message, frames)

    def _answered(self, pending: _Pending, message: Any, frames: Frames) -> Reply:
        if pending.ended_seq and len(frames) > 1:
            answer = Reply(pending.op, message, (), self._received(pending, frames[1:]))
        else:
            answer = Reply(pending.op, message, frames[1:])
        self.answer = answer
        if pending.op in SESSION_OPS:
            self._ended_seq, self._may_be_late = pending.seq, False  # the hub starts no earlier request any more
        self._pending = None
        return answer

    def _received(self, send: _Pending, frames: Frames) -> Reply:
        prelude = Prelude.unpack(frames[0])
        if (prelude.token, prelude.seq) != (send.token, send.ended_seq) or prelude.op not in _TO_RECEIVE:
            raise RemoteProtocolError("a reply to a SEND has frames that are no reply to the RECEIVE before it")
        op = Op(prelude.op & ~REPLY)
        message = _DONE if op is Op.RECEIVE else _read(op, memoryview(frames[0])[PRELUDE.size :])
        return Reply(Op.RECEIVE, message, frames[1:])

    def _heartbeat(self, pending: _Pending, body: Frame) -> None:
        reply = _read(Op.HEARTBEAT, body)
        self.progress = reply if reply.phase else None
        if reply.state == "running":
            pending.cuts = 0  # the request arrived, so it did not end these connections
        else:
            pending.lost, pending.ask_s = True, _AT_ONCE

    def _drop(self, prelude: Prelude, body: Frame) -> None:
        """Drop a message; if it reports the end of the abandoned request, send the held request at the next tick."""
        given_up = self.unsettled and (prelude.token, prelude.seq) == (self.token, self._sent_seq)
        if not given_up or not prelude.op & REPLY:
            return
        if prelude.op == REPLY | Op.HEARTBEAT and _read(Op.HEARTBEAT, body).state == "running":
            return
        self._ended_seq = self._sent_seq
        if self._pending is not None and self._pending.held:
            self._sent_seq = self._pending.seq
            self._pending.held, self._pending.lost, self._pending.ask_s = False, True, _AT_ONCE

    def tick(self, now_s: float) -> list[Frames]:
        """The messages to send now: the pending request again, or a HEARTBEAT that asks about it."""
        pending = self._pending
        if self.cut_off is not None:
            return []
        if pending is None:
            back, self._reconnected = self._reconnected, False
            return [self._question(self.token, self._session_seq)] if back else []
        if now_s < pending.ask_s:
            return []
        pending.ask_s = now_s + HEARTBEAT_S
        # A request without a session does not tell the hub whose session the connection carries.
        back = self._reconnected and pending.token == NO_SESSION != self.token
        beats = [self._question(self.token, self._session_seq)] if back else []
        self._reconnected = False
        if pending.held:
            return [self._question(pending.token, self._sent_seq)]
        if pending.lost or pending.token == NO_SESSION:
            pending.lost, pending.on_its_way = False, True
            return [*beats, pending.frames]
        return [self._question(pending.token, pending.seq)]

    def _question(self, token: bytes, seq: int) -> Frames:
        return [pack_head(Op.HEARTBEAT, self.hub_id, token, seq) + messages.pack(messages.Question())]

    def next_tick_s(self, now_s: float) -> float:
        next_s = now_s + HEARTBEAT_S
        if self._pending is not None:
            next_s = min(next_s, self._pending.ask_s)
        for since_s, warning_s in ((self._away_since_s, AWAY_WARNING_S), (self._heard_s, SILENCE_WARNING_S)):
            if since_s is not None and since_s + warning_s > now_s:
                next_s = min(next_s, since_s + warning_s)
        return max(0.0, next_s - now_s)

    def connected(self) -> None:
        """Take in that the transport is connected; the next tick sends a HEARTBEAT: the hub learns who it is."""
        self._away_since_s = self._refused_since_s = None
        self.obstacle = ""
        self._reconnected = bool(self.hub_id)
        if self._pending is not None:
            self._pending.ask_s = _AT_ONCE

    def disconnected(self, now_s: float) -> None:
        if self._away_since_s is None:
            self._away_since_s = now_s
        if (pending := self._pending) is not None and pending.on_its_way:
            pending.cuts, pending.on_its_way = pending.cuts + 1, False

    def accepted(self) -> None:
        self._refused_since_s = None

    def refused(self, now_s: float) -> None:
        """Take in that the address refused a connection: its machine answers, but no hub listens."""
        self._refused_s = now_s
        if self._refused_since_s is None:
            self._refused_since_s = now_s

    def looked(self, now_s: float) -> None:
        """Take in that all that arrived was read, before ``loss`` and ``tick``; a stop of the program is left out."""
        away_s = now_s - self._looked_s
        self._looked_s = now_s
        if away_s < STOPPED_S:
            return

        def later(since_s: float | None) -> float | None:
            return None if since_s is None else min(now_s, since_s + away_s)

        self._heard_s, self._unanswered_since_s = later(self._heard_s), later(self._unanswered_since_s)
        self._away_since_s, self._refused_since_s = later(self._away_since_s), later(self._refused_since_s)

    def lost(self, why: str) -> None:
        self._loss = self._loss or why

    @property
    def cut_off(self) -> Op | None:
        """The op that is not sent again, after ``CUTS_MAX`` connections ended with it; a HELLO always is."""
        pending = self._pending
        return pending.op if pending is not None and pending.cuts >= CUTS_MAX and self.hub_id else None

    @property
    def is_refused(self) -> bool:
        """True if the address of a known hub refuses connections; after ``REFUSED_S`` the hub is lost."""
        return self._refused_since_s is not None and bool(self.hub_id)

    @property
    def refused_s(self) -> float:
        """Seconds from the first to the last refusal in a row of the address of a known hub; negative if none."""
        if self._refused_since_s is None or not self.hub_id:
            return -math.inf
        return self._refused_s - self._refused_since_s

    def silence_s(self, now_s: float) -> float:
        """Seconds for which the hub has not answered, abandoned requests included, or the connection has been lost."""
        silent_since_s = self._unanswered_since_s
        if silent_since_s is None and self.pending is not None:
            silent_since_s = self._heard_s
        since_s = [self._away_since_s, silent_since_s]
        return max((now_s - each for each in since_s if each is not None), default=0.0)

    def trouble(self, now_s: float) -> str:
        if self._away_since_s is not None and now_s - self._away_since_s >= AWAY_WARNING_S:
            also = "others are refused" if self.is_refused else self.obstacle
            return "the connection to it is lost" + (also and f", and {also}")
        if self._pending is not None and self._heard_s is not None and now_s - self._heard_s >= SILENCE_WARNING_S:
            if self._refused_since_s is not None:
                return "connections to its address are refused"
            return f"it has been silent for {SILENCE_WARNING_S:g} s"
        return ""

    def loss(self, now_s: float) -> str:
        if self._loss or not self.hub_id:  # a hub that has not answered may be starting: the caller's timeout decides
            return self._loss
        if self._refused_since_s is not None and self._refused_s - self._refused_since_s >= REFUSED_S:
            return f"connections to its address were refused for {REFUSED_S:.0f} s"
        if self._pending is None or self._heard_s is None:
            return ""
        # Silence before the request does not count.
        since_s = self._heard_s if self._away_since_s is None else max(self._heard_s, self._away_since_s)
        if now_s - since_s >= self.reconnect_s:
            why = self.obstacle and f": {self.obstacle}"
            return f"it has not been reachable for reconnect_timeout={self.reconnect_s:g} s{why}"
        return ""


def _read(op: int, body: Frame) -> Any:
    try:
        message = messages.unpack(messages.REPLIES[op], body)
        validation.check(message, validation.REPLY_BOUNDS)
        return validation.with_short_texts(printable(message))
    except codec.DecodeError as error:
        raise RemoteProtocolError(f"a malformed {Op(op).name} reply: {error}") from error
