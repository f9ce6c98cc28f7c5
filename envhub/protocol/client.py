"""The client's half of the protocol: frames in, a reply and frames out.

``ClientProtocol`` holds one connection's requests without a reply, asks the hub about them while no reply comes, and
never takes one reply for another. The hub runs one request of a session at a time, but for those of ``WINDOW_OPS``:
while an abandoned one may run, the next one is held. That a request may have been sent is recorded before it is sent,
and its end only when the hub reports it, so that an exception at any moment leaves no unknown request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from envhub.errors import RemoteProtocolError, printable
from envhub.protocol import messages, validation
from envhub.protocol.messages import PART_OPS, REPLY, SESSION_OPS, WINDOW_OPS, Failure, HeartbeatReply, Op
from envhub.protocol.prelude import FRAME_BYTES_MAX, NO_SESSION, PRELUDE, RECONNECT_S, Frame, Frames, Prelude, pack_head
from envhub.values import codec

HEARTBEAT_S = 1.0
SILENCE_WARNING_S = 3.5  # while a request is pending and the client asks the hub about it every second
AWAY_WARNING_S = 0.3  # most reconnections take less
REFUSED_S = 5.0
CUTS_MAX = 10  # connections in a row that end while a request on them has no answer
NOTICES_MAX = 16  # of one connection: a hub that sends more would fill its clients' logs
STOPPED_S = 3 * HEARTBEAT_S  # a longer time between two calls of ``looked`` shows that the program did not run
_AT_ONCE = -math.inf
_DONE = messages.Done()
_NEVER_HELD = (Op.MAKE, Op.ATTACH, Op.CLOSE)  # the hub accepts them while another request runs


class Reply(NamedTuple):
    """The reply to the request of this number."""

    op: Op
    message: Any
    frames: Sequence[Frame]
    seq: int = 0


_new_reply: Callable[[tuple[Any, ...]], Reply] = partial(tuple.__new__, Reply)  # of all fields, without a Python call


class FrameTooLarge(ValueError):
    """A request has a frame of ``nbytes``, more than the hub accepts; the request was not begun."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class Pending(SimpleNamespace):  # it is made without a Python call
    """A request without a reply."""

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


class ClientProtocol:
    """The client's half: one connection, at most one pending request besides SEND and RECEIVE, at most one session."""

    def __init__(self, token: bytes = NO_SESSION, reconnect_s: float = RECONNECT_S) -> None:
        self.hub_id = 0  # until the hub has answered HELLO
        self.token = token
        self.progress: HeartbeatReply | None = None  # of the pending request; the caller resets it to None
        self.answer: Reply | None = None  # the reply to the last request; it survives an interrupt of the caller
        self.received: list[Reply] = []  # to SEND and RECEIVE, in the order in which they came; the caller takes them
        self.window = 1  # seqs of ``WINDOW_OPS`` without a reply differ by less, by the reply to MAKE
        self.goodbye: Failure | None = None  # the reason why the hub ended the session, from its GOODBYE
        self.obstacle = ""  # what keeps connections from being usable, for the user; empty where they were
        self.notices: list[str] = []  # texts for the user; the caller clears the list
        self.frame_bytes_max = FRAME_BYTES_MAX  # of a request
        self.reconnect_s = reconnect_s  # longest time without a reachable hub while a request is pending
        self._notices_left = NOTICES_MAX
        self.last_seq = 0  # of the session's last request; 0 as long as the hub can have no session
        self._sent_seq = 0  # seq of the session's last request that may have been sent
        self._may_be_late = False  # whether the hub may still start a copy of an abandoned request
        self._ended_seq = 0  # seq of the session's last ended request, from a reply or a HEARTBEAT reply
        self._ticket = 0
        self.pending: Pending | None = None  # besides SEND and RECEIVE
        self._parts: dict[int, Pending] = {}  # each SEND and RECEIVE without a reply, by seq, ascending
        self._reconnected = False  # whether the hub must learn which session the new connection belongs to
        self._received_s: float | None = None
        self._unanswered_since_s: float | None = None  # of the first request since the hub was heard last
        self._away_since_s: float | None = None
        self._refused_since_s: float | None = None
        self._refused_s = -math.inf  # when one was refused last
        self.looked_s = -math.inf  # time of the last ``looked``
        self._loss = ""

    @property
    def receives(self) -> bool:
        """True if a SEND or RECEIVE has no reply yet."""
        return bool(self._parts)

    @property
    def has_room(self) -> bool:
        """True if the hub takes a request of ``WINDOW_OPS`` now, before others of these have their replies."""
        return not self._parts or self.last_seq + 1 - next(iter(self._parts)) < self.window

    @property
    def _requests(self) -> list[Pending]:
        """All without a reply, in their order."""
        return [*self._parts.values()] if self.pending is None else [*self._parts.values(), self.pending]

    @property
    def unsettled(self) -> bool:
        """True if the hub may still execute a request of the session: the pending one, or an abandoned one."""
        return self._sent_seq > self._ended_seq

    def request(self, op: Op, message: Any, frames: Sequence[Frame], now_s: float) -> Frames:
        """Begin a request; return its frames, to be sent, or none while it is held. Raises ``FrameTooLarge``.

        One of the session that is none of ``WINDOW_OPS`` gives up each SEND and RECEIVE: their rows have come, or are
        wanted no more.
        """
        if self.pending is not None:
            raise RuntimeError(f"{self.pending.op.name} is pending")
        of_session, is_part = op in SESSION_OPS, op in PART_OPS
        token, seq = (self.token, self.last_seq + 1) if of_session else (NO_SESSION, self._ticket + 1)
        body = message.codes if op == Op.STEP else messages.pack(message)
        parts, received, last_sent_seq = self._parts, self.received, self._sent_seq
        after = 0
        if parts and of_session:
            if op in WINDOW_OPS:
                after = seq - next(reversed(parts))
            else:
                last_sent_seq = max(last_sent_seq, *(each.seq for each in parts.values() if not each.held), 0)
                self._may_be_late, parts, received = True, {}, []
        sent = [pack_head(op, after, self.hub_id, token, seq) + body, *frames]
        if (nbytes := max(map(len, sent))) > self.frame_bytes_max:
            raise FrameTooLarge(nbytes)
        held = of_session and last_sent_seq > self._ended_seq and op not in _NEVER_HELD
        done = pack_head(REPLY | op, 0, self.hub_id, token, seq)
        ask_s = _AT_ONCE if held else now_s + HEARTBEAT_S
        request = Pending(
            op=op, token=token, seq=seq, frames=sent, done=done, ask_s=ask_s, held=held, on_its_way=not held
        )
        last_seq, ticket = (seq, self._ticket) if of_session else (self.last_seq, seq)
        sent_seq = seq if of_session and not held and not is_part else last_sent_seq
        self._received_s = now_s
        if op == Op.CLOSE:
            self._notices_left = NOTICES_MAX  # what it says of the end is shown, whatever it has said before
        if self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        if is_part:
            parts = {**parts, seq: request}
        pending = None if is_part else request
        begun = None, pending, parts, received, (last_seq, ticket, sent_seq)
        # Without a call, so that no interrupt comes in between: the request has begun, or it has not.
        self.answer, self.pending, self._parts, self.received, (self.last_seq, self._ticket, self._sent_seq) = begun
        return [] if held else sent

    def give_up(self) -> None:
        self._may_be_late = self._may_be_late or (self.pending is not None and self.pending.op in SESSION_OPS)
        self.pending = self.answer = None

    def receive(self, frames: Frames, now_s: float) -> Reply | None:
        """Process one message; return it if it is the pending request's reply. Raises ``RemoteProtocolError``.

        A reply to SEND or RECEIVE is put with those that were ``received``.
        """
        request, message, prelude = self.pending, _DONE, None
        if request is None or request.op != Op.STEP or not frames or frames[0] != request.done:
            prelude = Prelude.unpack(frames[0] if frames else b"")  # the Done of a step is known without this
        self._received_s = now_s
        self._unanswered_since_s = self._away_since_s = self._refused_since_s = None
        if prelude is not None:
            request, message = self._recognize(prelude, memoryview(frames[0])[PRELUDE.size :])
        if request is None:
            return None
        reply = _new_reply((request.op, message, frames[1:], request.seq))
        if request is not self.pending:
            parts = {seq: each for seq, each in self._parts.items() if each is not request}
            self.received, self._parts = [*self.received, reply], parts
            return None
        self.answer, self.pending = reply, None
        if request.op in SESSION_OPS:
            self._ended_seq, self._may_be_late = request.seq, False  # the hub starts no earlier request any more
        return reply

    def _recognize(self, prelude: Prelude, body: Frame) -> tuple[Pending | None, Any]:
        """The request without a reply that this message is the reply to, if it is one, and the message."""
        pending = self.pending
        op = prelude.op & ~REPLY
        if self.hub_id and prelude.hub_id != self.hub_id:
            self._loss = "another hub answers at its address"
            return None, None
        if op == Op.GOODBYE and prelude.token == self.token:
            self.goodbye = _read(Op.FAILURE, body)
            self._loss = self.goodbye.message
            return None, None
        if op == Op.NOTICE and prelude.token == self.token and not prelude.op & REPLY:
            if self._notices_left > 0:
                self._notices_left -= 1
                self.notices.append(_read(Op.NOTICE, body).text)
            return None, None
        if pending is None or (prelude.token, prelude.seq) != (pending.token, pending.seq):
            pending = self._parts.get(prelude.seq) if prelude.token == self.token else None
        if pending is None or not prelude.op & REPLY:
            self._drop(prelude, body)
            return None, None
        if op == Op.HEARTBEAT:
            self._heartbeat(pending, body)
            return None, None
        if op not in (pending.op, Op.FAILURE):
            raise RemoteProtocolError(f"a reply with op {op} to a {pending.op.name}")
        kind = messages.REPLIES[op]
        message = kind() if kind is messages.Done else _read(op, body)
        if self._may_be_late and isinstance(message, Failure) and message.code == "bad_seq":
            pending.lost = True  # a copy of an abandoned request runs; the next tick sends this request again
            return None, None
        if isinstance(message, Failure) and message.code == "session_lost" and pending.op in SESSION_OPS:
            self.goodbye, self._loss = message, message.message  # nothing is to be asked of it any more
        if isinstance(message, messages.Made):
            self.window = message.window
        if op == Op.HELLO:
            if not prelude.hub_id:
                raise RemoteProtocolError("a hub id of 0")
            self.hub_id = prelude.hub_id
        return pending, message

    def _heartbeat(self, pending: Pending, body: Frame) -> None:
        reply = _read(Op.HEARTBEAT, body)
        self.progress = reply if reply.phase else None
        if reply.state == "running":
            pending.cuts = 0  # the request arrived, so it did not end these connections
        else:
            pending.lost, pending.ask_s = True, _AT_ONCE

    def _drop(self, prelude: Prelude, body: Frame) -> None:
        """Drop a message; if it reports the end of the abandoned request, send the held ones at the next tick."""
        given_up = self.unsettled and (prelude.token, prelude.seq) == (self.token, self._sent_seq)
        if not given_up or not prelude.op & REPLY:
            return
        if prelude.op == REPLY | Op.HEARTBEAT and _read(Op.HEARTBEAT, body).state == "running":
            return
        self._ended_seq = self._sent_seq
        for request in self._requests:
            if request.held:
                if request is self.pending:
                    self._sent_seq = request.seq
                request.held, request.lost, request.ask_s = False, True, _AT_ONCE

    def tick(self, now_s: float) -> list[Frames]:
        """The messages to send now: requests without a reply again, or HEARTBEATs that ask about them."""
        if self.cut_off is not None:
            return []
        requests = self._requests
        to_ask = [each for each in requests if now_s >= each.ask_s]
        if requests and not to_ask:
            return []
        # A request without a session does not tell the hub whose session the connection carries.
        back = self._reconnected and all(each.token == NO_SESSION != self.token for each in to_ask)
        self._reconnected = False
        messages = [self._question(self.token, self.last_seq)] if back else []
        for each in to_ask:
            each.ask_s = now_s + HEARTBEAT_S
            if each.held:
                messages.append(self._question(each.token, self._sent_seq))
            elif each.lost or each.token == NO_SESSION:
                each.lost, each.on_its_way = False, True
                messages.append(each.frames)
            else:
                messages.append(self._question(each.token, each.seq))
        return messages

    def _question(self, token: bytes, seq: int) -> Frames:
        return [pack_head(Op.HEARTBEAT, 0, self.hub_id, token, seq) + messages.pack(messages.Question())]

    def next_tick_s(self, now_s: float) -> float:
        next_s = now_s + HEARTBEAT_S
        if self.pending is not None:  # inline: each step comes here
            next_s = min(next_s, self.pending.ask_s)
        for part in self._parts.values():
            next_s = min(next_s, part.ask_s)
        for since_s, warning_s in ((self._away_since_s, AWAY_WARNING_S), (self._received_s, SILENCE_WARNING_S)):
            if since_s is not None and since_s + warning_s > now_s:
                next_s = min(next_s, since_s + warning_s)
        return max(0.0, next_s - now_s)

    def connected(self) -> None:
        """Take in that the transport is connected; the next tick sends a HEARTBEAT: the hub learns who it is."""
        self._away_since_s = self._refused_since_s = None
        self.obstacle = ""
        self._reconnected = bool(self.hub_id)
        for request in self._requests:
            request.ask_s = _AT_ONCE

    def disconnected(self, now_s: float) -> None:
        if self._away_since_s is None:
            self._away_since_s = now_s
        for request in self._requests:
            if request.on_its_way:
                request.cuts, request.on_its_way = request.cuts + 1, False

    def accepted(self) -> None:
        self._refused_since_s = None

    def refused(self, now_s: float) -> None:
        """Take in that the address refused a connection: its machine answers, but no hub listens."""
        self._refused_s = now_s
        if self._refused_since_s is None:
            self._refused_since_s = now_s

    def looked(self, now_s: float) -> None:
        """Take in that all that arrived was read, before ``loss`` and ``tick``; a stop of the program is left out."""
        away_s = now_s - self.looked_s
        self.looked_s = now_s
        if away_s < STOPPED_S:
            return

        def later(since_s: float | None) -> float | None:
            return None if since_s is None else min(now_s, since_s + away_s)

        self._received_s, self._unanswered_since_s = later(self._received_s), later(self._unanswered_since_s)
        self._away_since_s, self._refused_since_s = later(self._away_since_s), later(self._refused_since_s)

    def lost(self, why: str) -> None:
        self._loss = self._loss or why

    @property
    def cut_off(self) -> Op | None:
        """The op that is not sent again, after ``CUTS_MAX`` connections ended with it; a HELLO always is."""
        return next((each.op for each in self._requests if each.cuts >= CUTS_MAX and self.hub_id), None)

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
        if silent_since_s is None and (self.pending is not None or self._parts):
            silent_since_s = self._received_s
        since_s = [self._away_since_s, silent_since_s]
        return max((now_s - each for each in since_s if each is not None), default=0.0)

    def trouble(self, now_s: float) -> str:
        if self._away_since_s is not None and now_s - self._away_since_s >= AWAY_WARNING_S:
            also = "others are refused" if self.is_refused else self.obstacle
            return "the connection to it is lost" + (also and f", and {also}")
        if self._requests and self._received_s is not None and now_s - self._received_s >= SILENCE_WARNING_S:
            if self._refused_since_s is not None:
                return "connections to its address are refused"
            return f"it has been silent for {SILENCE_WARNING_S:g} s"
        return ""

    def loss(self, now_s: float) -> str:
        if self._loss or not self.hub_id:  # a hub that has not answered may be starting: the caller's timeout decides
            return self._loss
        if self._refused_since_s is not None and self._refused_s - self._refused_since_s >= REFUSED_S:
            return f"connections to its address were refused for {REFUSED_S:.0f} s"
        if self._received_s is None or (self.pending is None and not self._parts):
            return ""
        # Silence before the request does not count.
        since_s = self._received_s if self._away_since_s is None else max(self._received_s, self._away_since_s)
        if now_s - since_s >= self.reconnect_s:
            why = self.obstacle and f": {self.obstacle}"
            return f"it has not been reachable for reconnect_timeout={self.reconnect_s:g} s{why}"
        return ""


def _read(op: int, body: Frame) -> Any:
    try:
        message = messages.unpack(messages.REPLIES[op], body)
        validation.check(message, validation.REPLY_BOUNDS)
        return validation.shorten_texts(printable(message))
    except codec.DecodeError as error:
        raise RemoteProtocolError(f"a malformed {Op(op).name} reply: {error}") from error
