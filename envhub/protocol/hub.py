"""The hub's half of the protocol: frames in, events and frames out.

``HubProtocol`` finds sessions by token. It makes sure that every request gets exactly one reply and is executed at most
once, whatever the network drops, delays or duplicates.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from envhub.errors import RemoteProtocolError
from envhub.protocol import messages, validation
from envhub.protocol.messages import REPLY, SESSION_OPS, WINDOW_OPS, Failure, HeartbeatReply, Made, Op, Step
from envhub.protocol.prelude import FRAMES_MAX, NO_SESSION, PRELUDE, VERSION, Frame, Frames, Prelude, pack_head
from envhub.values import codec

SEQ_MAX = (1 << 64) - 1
SESSIONS_MAX = 64
ENDED_MAX = 256
CLOSED_EARLY_MAX = 256  # tokens that were closed before their MAKE arrived
LEASE_S = 60.0

_OPS = {int(op): op for op in Op}  # a lookup is faster than Op(number)


class Incoming(NamedTuple):
    """A new request, which the caller must execute and answer."""

    peer: bytes
    op: Op
    token: bytes
    seq: int
    message: Any
    frames: Sequence[Frame]


_incoming = tuple.__new__  # twice as fast as Incoming(...)

CODES_MAX, CODE_CHARS_MAX = 64, 64  # of failures that are counted

FIRST_OPS = frozenset([Op.MAKE, Op.ATTACH])  # requests that give a session its token


@dataclass
class _Link:
    """The peer, the last requests and their replies of one session."""

    peer: bytes
    connection: int
    owner: str = ""  # the name of the only client whose requests are admitted
    lease_s: float = LEASE_S  # that the hub gave when the session was made
    lasts: bool = True  # False once the connection has ended
    uses: bool = True  # False while the client only observes
    seq: int = 0  # of the last request
    # By seq, the replies that the client may not have: of the last request, and of those of ``WINDOW_OPS`` in a row up
    # to it, of which there are less than ``window``. None where the request runs.
    replies: dict[int, Frames | None] = field(default_factory=dict)
    window: int = 1
    has_window: bool = False  # whether the last request was of ``WINDOW_OPS``
    step: Step | None = None  # the last request, if it was a STEP
    connections: set[int] = field(default_factory=set)  # every connection that replies were sent on
    made: bool = False  # whether a MAKE or an ATTACH has given its token a session
    end: Failure | None = None  # why requests of its client are refused, once the session is no more
    next_step: bytes = b""  # the expected first frame of the next STEP

    @property
    def running(self) -> bool:
        return None in self.replies.values()

    def follows(self, op: Op, seq: int) -> bool:
        """True if a request with this op and seq may run now."""
        if seq <= self.seq or op in FIRST_OPS:
            return False
        if op == Op.CLOSE or not self.running:  # the client may close while others run
            return True
        oldest = next(each for each, reply in self.replies.items() if reply is None)
        return self.has_window and op in WINDOW_OPS and seq - oldest < self.window

    def admit(self, op: Op, seq: int) -> None:
        has_window = op in WINDOW_OPS
        kept = self.replies.items() if has_window and self.has_window else ()
        self.replies = {**{each: reply for each, reply in kept if seq - each < self.window}, seq: None}
        self.seq, self.has_window, self.step = seq, has_window, None


class HubProtocol:
    """The hub's half: frames in, events and frames out."""

    def __init__(
        self,
        hub_id: int,
        lease_s: float = LEASE_S,
        sessions_max: int = SESSIONS_MAX,
        header_limits: codec.HeaderLimits = codec.STRANGERS,
    ) -> None:
        self.hub_id = hub_id
        self._header_limits = header_limits
        self.outgoing: list[tuple[bytes, Frames]] = []  # peers and frames to send, in order; the caller empties it
        self.malformed = 0
        self.refused = 0
        # Failed and refused requests by the code of the failure, without those to sessions that were never made.
        self.failures: Counter[str] = Counter()
        self.replayed = 0
        # Why no session is made any more, if that is so; and whether none is taken over either, since the hub stops.
        self.draining: Failure | None = None
        self.stopping = False
        # The lease of the next sessions, and how many there may be; the caller may change both.
        self.lease_s = lease_s
        self.sessions_max = sessions_max
        self._links: dict[bytes, _Link] = {}
        self.leases: dict[bytes, float] = {}  # when each expires; only of sessions without a connected client
        # The caller empties these: sessions whose client has come back while their lease ran; refused requests to
        # sessions of another client; and tokens of refused requests to sessions of an earlier hub at this address.
        self.returned: list[bytes] = []
        self.foreign: list[tuple[Op, bytes]] = []
        self.stale: list[bytes] = []
        self._ended: dict[bytes, _Link] = {}  # the last ENDED_MAX that ended
        self._closed_early: dict[bytes, _Link] = {}  # the last tokens that were closed without a session
        self._next_steps: dict[bytes, tuple[bytes, _Link]] = {}  # tokens and links, by ``_Link.next_step``

    # --- in -------------------------------------------------------------------------------------------------------

    def receive_step(self, peer: bytes, first: bytes, frames: Frames) -> Incoming | None:
        """The STEP that its session expects next from this peer, found fast; after None call ``receive``."""
        token, link = self._next_steps.get(first) or _NOBODY
        if link.peer != peer or token in self.leases or len(frames) >= FRAMES_MAX:
            return None
        if not (link.lasts and link.uses) or link.connection < 0:
            return None
        del self._next_steps[first]
        link.seq = seq = link.seq + 1
        link.replies, link.has_window = {seq: None}, False
        return _incoming(Incoming, (peer, Op.STEP, token, seq, link.step, frames))

    def receive(
        self, peer: bytes, connection: int, frames: Frames, owner: str = "", uses: bool = True
    ) -> Incoming | None:
        """Process one message of ``peer``, a routing id; return its request if it is new and must be executed.

        ``owner`` is the client behind the ``connection``, who has its sessions; ``uses`` is False if it only observes.
        """
        try:
            prelude = Prelude.unpack(frames[0] if frames else b"")
        except RemoteProtocolError:
            self.malformed += 1  # without a prelude no reply could refer to the message
            return None
        if refusal := self._refusal(prelude, uses):
            self.malformed += refusal.code == "malformed"
            self._refuse(peer, prelude, refusal)
            return None
        op = _OPS[prelude.op]
        if op == Op.HEARTBEAT:
            return self._heartbeat(peer, connection, prelude, owner, uses)
        message = None
        link = self._links.get(prelude.token)
        if op == Op.CLOSE and link is not None and link.running:
            # It is read before it is admitted: an admitted CLOSE replaces what runs, even if it then fails.
            message = self._read_request(op, frames)
            if isinstance(message, Failure):
                self._send(peer, REPLY | Op.FAILURE, prelude.token, prelude.seq, message)
                return None
        if op in SESSION_OPS and not self._admit(peer, connection, prelude, owner):
            return None
        if message is None:
            message = self._read_request(op, frames)
        if isinstance(message, Failure):
            self.fail(Incoming(peer, op, prelude.token, prelude.seq, None, ()), message)
            if op in FIRST_OPS:
                self.forget(prelude.token)  # the caller was never given this session
            return None
        return Incoming(peer, op, prelude.token, prelude.seq, message, frames[1:])

    def _refusal(self, prelude: Prelude, uses: bool) -> Failure | None:
        if prelude.version != VERSION:
            text = f"this hub speaks protocol {VERSION}, the client {prelude.version}; upgrade the older side"
            return Failure("unsupported_version", "hub", text)
        if prelude.op not in messages.REQUESTS and prelude.op != Op.STEP:
            return Failure("malformed", "request", f"this hub knows no request with op {prelude.op}")
        if not uses and prelude.op in SESSION_OPS:
            return Failure("not_permitted", "hub", "this key lets its client observe, not use, the hub")
        if prelude.op in SESSION_OPS and prelude.token == NO_SESSION:
            return Failure("malformed", "request", "a session's token must not be all zero")
        if prelude.op != Op.HELLO and prelude.hub_id != self.hub_id:
            if prelude.token != NO_SESSION:
                self.stale.append(prelude.token)
            return Failure("stale_hub", "hub", "the request was meant for a hub that has ended; nothing was done")
        return None

    def _admit(self, peer: bytes, connection: int, prelude: Prelude, owner: str) -> bool:
        """True if the session request must be executed, else it is answered, or dropped as if it had not come."""
        link = self._links.get(prelude.token)
        if link is None:
            return self._admit_first(peer, connection, prelude, owner)
        if link.owner != owner:
            self.foreign.append((_OPS[prelude.op], prelude.token))
            self._refuse(peer, prelude, _NO_SESSION)
            return False
        self._on_request(link, peer, connection, prelude.token, True)
        if prelude.seq in link.replies:
            self.replayed += 1
            if (reply := link.replies[prelude.seq]) is not None:
                self.outgoing.append((peer, reply))
            return False  # while the request runs: its reply will go to this peer
        if prelude.after and prelude.seq - prelude.after > link.seq:
            return False  # the client sends it again, behind the one that was lost before it
        # After abandoned requests the client continues with a later seq.
        op = _OPS[prelude.op]
        if not link.follows(op, prelude.seq):
            text = f"request {prelude.seq} does not follow request {link.seq}{', which runs' if link.running else ''}"
            if op in FIRST_OPS:
                text = "the session is made already; another one needs a token of its own"
            self._refuse(peer, prelude, Failure("bad_seq", "request", text))
            return False
        link.admit(op, prelude.seq)
        self._next_steps.pop(link.next_step, None)
        return True

    def _admit_first(self, peer: bytes, connection: int, prelude: Prelude, owner: str) -> bool:
        ended = self._ended.get(prelude.token) or self._closed_early.get(prelude.token)
        reply = None if ended is None else ended.replies.get(prelude.seq)
        if ended is not None and reply is not None and owner == ended.owner:
            self.replayed += 1
            self.outgoing.append((peer, reply))
            return False
        if prelude.op not in FIRST_OPS or (ended is not None and prelude.seq <= ended.seq):
            # A client also closes what was never made, such as a session of a MAKE that was refused.
            lost = ended is not None and ended.made
            why = self.draining if self.stopping else None
            if why is None and ended is not None and owner == ended.owner:
                why = ended.end
            self._refuse(peer, prelude, why or _NO_SESSION, self.stopping or lost)
            if prelude.op == Op.CLOSE and ended is None:
                # The CLOSE may have overtaken an abandoned MAKE that was sent over another connection.
                closed = _Link(peer, connection, owner, seq=prelude.seq)
                _remember(self._closed_early, prelude.token, closed, CLOSED_EARLY_MAX)
            return False
        if self.draining is not None and (self.stopping or prelude.op == Op.MAKE):
            self._refuse(peer, prelude, self.draining)
            return False
        if prelude.op == Op.MAKE and len(self._links) >= self.sessions_max:
            there = f"the hub already has sessions_max={self.sessions_max} sessions"
            self._refuse(peer, prelude, Failure("limit", "hub", f"{there}; close one, or wait for a lease to end"))
            return False
        link = _Link(peer, connection, owner, self.lease_s, seq=prelude.seq, connections={connection})
        link.admit(_OPS[prelude.op], prelude.seq)
        self._links[prelude.token] = link
        return True

    def _heartbeat(self, peer: bytes, connection: int, prelude: Prelude, owner: str, uses: bool) -> Incoming | None:
        """Answer a heartbeat, or return it if its request runs: only the caller knows the progress."""
        link = self._links.get(prelude.token)
        reply = HeartbeatReply("unknown")
        if link is not None and link.owner == owner:
            self._on_request(link, peer, connection, prelude.token, uses)
            if prelude.seq <= link.seq:
                if link.replies.get(prelude.seq, b"") is None:
                    return Incoming(peer, Op.HEARTBEAT, prelude.token, prelude.seq, None, ())
                reply = HeartbeatReply("answered")
        self._send(peer, REPLY | Op.HEARTBEAT, prelude.token, prelude.seq, reply)
        return None

    def _on_request(self, link: _Link, peer: bytes, connection: int, token: bytes, uses: bool) -> None:
        link.peer, link.connection, link.lasts, link.uses = peer, connection, True, uses
        link.connections.add(connection)
        if self.leases.pop(token, None) is not None:
            self.returned.append(token)

    def _read_request(self, op: Op, frames: Frames) -> Any:
        try:
            if len(frames) > FRAMES_MAX:
                raise codec.DecodeError(f"{len(frames)} frames where at most {FRAMES_MAX} are accepted")
            body = memoryview(frames[0])[PRELUDE.size :]
            if op == Op.STEP:
                return Step(bytes(body))
            message = messages.unpack(messages.REQUESTS[op], body, self._header_limits)
            validation.check(message)
            return message
        except validation.OutOfBounds as error:
            self.refused += 1
            return Failure("refused", "request", f"the request makes no sense: {error}")
        except codec.DecodeError as error:
            self.malformed += 1
            return Failure("malformed", "request", f"the request cannot be read: {error}")

    # --- out ------------------------------------------------------------------------------------------------------

    def answer(self, request: Incoming, message: Any, frames: Sequence[Frame] = ()) -> None:
        """Send and keep the reply; memory that ``frames`` view MUST NOT change as long as the client may ask again.

        That is until the session's next request, and for a request of ``WINDOW_OPS`` as long as those in a row last.
        """
        body = b"" if isinstance(message, messages.Done) else messages.pack(message)
        if type(message) is Made and (link := self._links.get(request.token)) is not None:
            link.window = message.window
        self._reply(request, REPLY | request.op, body, frames)

    def fail(self, request: Incoming, failure: Failure) -> None:
        self._count(failure)
        self._reply(request, REPLY | Op.FAILURE, messages.pack(failure), ())

    def _reply(self, request: Incoming, op: int, body: bytes, frames: Sequence[Frame]) -> None:
        peer, asked, token, seq, message, _ = request
        reply = [pack_head(op, 0, self.hub_id, token, seq) + body, *frames]
        link = self._links.get(token) if asked in SESSION_OPS else None
        if link is not None and seq in link.replies:
            peer, link.replies[seq] = link.peer, reply
            link.made = link.made or op == REPLY | asked
            if op == REPLY | Op.STEP and seq < SEQ_MAX:
                link.step = message
                link.next_step = pack_head(Op.STEP, 0, self.hub_id, token, seq + 1) + message.codes
                self._next_steps[link.next_step] = (token, link)
        self.outgoing.append((peer, reply))

    def _count(self, failure: Failure) -> None:
        # A worker can send any text as a code, and any number of codes.
        if failure.code in self.failures or (len(self.failures) < CODES_MAX and len(failure.code) <= CODE_CHARS_MAX):
            self.failures[failure.code] += 1

    def refuse(self, peer: bytes, frames: Frames, failure: Failure) -> None:
        with contextlib.suppress(RemoteProtocolError):
            self._refuse(peer, Prelude.unpack(frames[0] if frames else b""), failure)

    def _refuse(self, peer: bytes, prelude: Prelude, failure: Failure, counts: bool = True) -> None:
        self.refused += 1
        if counts:
            self._count(failure)
        self._send(peer, REPLY | Op.FAILURE, prelude.token, prelude.seq, failure)

    def _send(self, peer: bytes, op: int, token: bytes, seq: int, message: Any) -> None:
        self.outgoing.append((peer, [pack_head(op, 0, self.hub_id, token, seq) + messages.pack(message)]))

    def goodbye(self, token: bytes, why: Failure) -> None:
        if link := self._links.get(token):
            self._send(link.peer, Op.GOODBYE, token, 0, why)

    def notice(self, token: bytes, text: str) -> None:
        """Push a NOTICE, a text for the user of a session; a client that does not know this push drops it."""
        if link := self._links.get(token):
            self._send(link.peer, Op.NOTICE, token, 0, messages.Notice(text))

    # --- sessions and leases --------------------------------------------------------------------------------------

    def forget(self, token: bytes, end: Failure | None = None) -> None:
        """Forget a session that has ended; its later requests fail, with ``end``, except a copy of the last one."""
        link = self._links.pop(token, None)
        self.leases.pop(token, None)
        if link is None:
            if token in self._ended:  # it was taken over, and its next holder's session has ended
                self._ended[token].end = end
            return
        link.end = end
        self._next_steps.pop(link.next_step, None)
        last = link.replies.get(link.seq)
        # Frames but the first one are views of the session's memory.
        link.replies = {link.seq: last} if last is not None and len(last) == 1 else {}
        _remember(self._ended, token, link, ENDED_MAX)

    def connection_ended(self, connection: int) -> list[tuple[bytes, bytes]]:
        """End a connection; return ``(token, peer)`` of each session whose last message used it."""
        ended = [(token, link) for token, link in self._links.items() if link.connection == connection]
        for _, link in ended:
            link.lasts = False
        for link in self._links.values():
            link.connections.discard(connection)
        return [(token, link.peer) for token, link in ended]

    def sessions_of(self, peer: bytes) -> list[bytes]:
        return [token for token, link in self._links.items() if link.peer == peer and token not in self.leases]

    def peer_of(self, token: bytes) -> bytes | None:
        link = self._links.get(token)
        return None if link is None or token in self.leases else link.peer

    def link_of(self, token: bytes) -> _Link:
        """The connections and the lease of a session, to be read; ``connection`` is -1 if there is no such session."""
        return self._links.get(token, _NO_LINK)

    def connection_lost(self, token: bytes, now_s: float) -> None:
        self.leases[token] = now_s + self.link_of(token).lease_s

    def expired(self, now_s: float) -> list[bytes]:
        return [token for token, until_s in self.leases.items() if until_s <= now_s]

    def next_expiry_s(self) -> float:
        return min(self.leases.values(), default=math.inf)


SHUTTING_DOWN = Failure("draining", "hub", "the hub is shutting down")
_NO_SESSION = Failure(
    "session_lost",
    "session",
    "this hub has no such session: its lease ran out, it was closed or taken over, or it never was",
)
_NO_LINK = _Link(b"", -1)
_NOBODY = (NO_SESSION, _NO_LINK)


def _remember(links: dict[bytes, _Link], token: bytes, link: _Link, links_max: int) -> None:
    links[token] = link
    if len(links) > links_max:
        del links[next(iter(links))]
