"""The protocol's two halves without a socket, a process or a clock: frames in, events and frames out.

``HubProtocol`` finds sessions by token and sees to it that every request gets exactly one reply and is carried out at
most once, whatever the network drops, delays or doubles. ``ClientProtocol`` holds one connection's pending request,
asks after it while no answer comes, and never takes one reply for another. PROTOCOL.md is the specification; time is
``now_s``, seconds on a monotonic clock of the caller's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from envhub import codec, messages
from envhub.errors import RemoteProtocolError
from envhub.messages import REPLY, SESSION_OPS, Failure, HeartbeatReply, Op, Step

MAGIC = b"EHUB"
VERSION = (1, 0)  # a peer of another major version is refused
PRELUDE = struct.Struct("<4sBBBxQ16sQ")  # magic, major, minor, op, hub id, session token, seq
NO_SESSION = bytes(16)

FRAMES_MAX = 1024
FRAME_BYTES_MAX = 1 << 30  # of a reply
SESSIONS_MAX = 64
ENDED_MAX = 256
LEASE_S = 60.0

HEARTBEAT_S = 1.0
SILENCE_WARNING_S = 4.0
REFUSED_S = 5.0
RECONNECT_S = 60.0

_OPS = {int(op): op for op in Op}  # looking an op up is quicker than making it

Frame = Any  # bytes, or any buffer
Frames = list[Frame]


class Prelude(NamedTuple):
    """The fixed start of every first frame."""

    op: int
    hub_id: int
    token: bytes
    seq: int
    major: int = VERSION[0]
    minor: int = VERSION[1]

    def pack(self) -> bytes:
        """The prelude's bytes."""
        op, hub_id, token, seq, major, minor = self
        return PRELUDE.pack(MAGIC, major, minor, op, hub_id, token, seq)

    @classmethod
    def unpack(cls, frame: Frame) -> Prelude:
        """The prelude that ``frame`` starts with.

        Raises:
            RemoteProtocolError: too short, or not EnvHub's.
        """
        if len(frame) < PRELUDE.size:
            raise RemoteProtocolError(f"a first frame of {len(frame)} bytes is shorter than a prelude")
        magic, major, minor, op, hub_id, token, seq = PRELUDE.unpack_from(frame)
        if magic != MAGIC:
            raise RemoteProtocolError("the first frame does not start with EHUB")
        return cls(op, hub_id, token, seq, major, minor)


class Incoming(NamedTuple):
    """A request that is new and is to be carried out and answered."""

    peer: bytes
    op: Op
    token: bytes
    seq: int
    message: Any
    frames: Sequence[Frame]


@dataclass
class _Link:
    """What the hub's half knows of one session."""

    peer: bytes
    connection: int
    seq: int = 0
    running: bool = False
    reply: Frames | None = None


class HubProtocol:
    """The hub's half.

    Attributes:
        outgoing: ``(peer, frames)`` to send, in order; the caller empties it.
        leases: when the lease runs out, by token, of the sessions whose client is not connected.
    """

    def __init__(
        self,
        hub_id: int,
        lease_s: float = LEASE_S,
        sessions_max: int = SESSIONS_MAX,
        running: Callable[[bytes], HeartbeatReply] = lambda token: HeartbeatReply("running"),
    ) -> None:
        """Be the hub of this id; ``running`` tells how far the request of a session is that runs."""
        self.hub_id = hub_id
        self._running = running
        self.outgoing: list[tuple[bytes, Frames]] = []
        self.malformed = 0
        self.refused = 0
        self.replayed = 0
        self.draining = False
        self._lease_s = lease_s
        self._sessions_max = sessions_max
        self._links: dict[bytes, _Link] = {}
        self.leases: dict[bytes, float] = {}
        self._ended: dict[bytes, _Link] = {}  # the last ENDED_MAX that ended

    # --- in -------------------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, connection: int, frames: Frames) -> Incoming | None:
        """Take one message from ``peer``; returns the request in it if that is new and has to be carried out.

        Args:
            peer: the ROUTER's routing id.
            connection: names the transport connection, for ``connection_lost``.
            frames: the message's frames without the routing id.
        """
        try:
            prelude = Prelude.unpack(frames[0] if frames else b"")
        except RemoteProtocolError:
            self.malformed += 1  # without a prelude there is nothing an answer could refer to
            return None
        refusal = self._refusal(prelude)
        if refusal is not None:
            self._refuse(peer, prelude, refusal)
            return None
        op = _OPS[prelude.op]
        if op == Op.HEARTBEAT:
            self._heartbeat(peer, connection, prelude)
            return None
        if op in SESSION_OPS and not self._admit(peer, connection, prelude):
            return None
        try:
            message = _read_request(op, frames)
        except codec.DecodeError as error:
            self.malformed += 1
            failure = Failure("malformed", "request", f"the request cannot be read: {error}")
            self.fail(Incoming(peer, op, prelude.token, prelude.seq, None, ()), failure)
            if op == Op.MAKE:
                self.forget(prelude.token)  # nobody else knows of this session
            return None
        return Incoming(peer, op, prelude.token, prelude.seq, message, frames[1:])

    def _refusal(self, prelude: Prelude) -> Failure | None:
        if prelude.major != VERSION[0]:
            spoken = f"{VERSION[0]}.{VERSION[1]}"
            text = f"this hub speaks protocol {spoken}, the client {prelude.major}.{prelude.minor}; upgrade the older"
            return Failure("unsupported_version", "hub", text)
        if prelude.op not in messages.REQUESTS and prelude.op != Op.STEP:
            return Failure("malformed", "request", f"this hub knows no request with op {prelude.op}")
        if prelude.op in SESSION_OPS and prelude.token == NO_SESSION:
            return Failure("malformed", "request", "a session's token must not be all zero")
        if prelude.op != Op.HELLO and prelude.hub_id != self.hub_id:
            return Failure("stale_hub", "hub", "the request was meant for a hub that has ended; nothing was done")
        return None

    def _admit(self, peer: bytes, connection: int, prelude: Prelude) -> bool:
        """Whether the session request is the next of its session; answers it here where it is not."""
        link = self._links.get(prelude.token)
        if link is None:
            return self._admit_first(peer, connection, prelude)
        self._heard(link, peer, connection, prelude.token)
        if prelude.seq == link.seq:
            self.replayed += 1
            if link.reply is not None:
                self.outgoing.append((peer, link.reply))
            return False  # with no reply yet it joins the running one, whose reply now goes to this peer
        # A client that gave requests up goes on with a later seq, and may close while one of them still runs.
        follows = prelude.seq > link.seq and (not link.running or prelude.op == Op.CLOSE)
        if not follows or prelude.op == Op.MAKE:
            text = f"request {prelude.seq} does not follow request {link.seq}{', which runs' if link.running else ''}"
            if prelude.op == Op.MAKE:
                text = "the session is made already; another one needs a token of its own"
            self._refuse(peer, prelude, Failure("bad_seq", "request", text))
            return False
        link.seq, link.running, link.reply = prelude.seq, True, None
        return True

    def _admit_first(self, peer: bytes, connection: int, prelude: Prelude) -> bool:
        """Whether the request begins a session; a late copy of a request of one that ended is not carried out again."""
        ended = self._ended.get(prelude.token)
        if ended is not None and ended.reply is not None and prelude.seq == ended.seq:
            self.replayed += 1
            self.outgoing.append((peer, ended.reply))
            return False
        if prelude.op != Op.MAKE or (ended is not None and prelude.seq <= ended.seq):
            text = "this hub has no such session: its lease ran out, it was closed, or it never was"
            self._refuse(peer, prelude, Failure("session_lost", "session", text))
            return False
        if refusal := self._make_refusal():
            self._refuse(peer, prelude, refusal)
            return False
        self._links[prelude.token] = _Link(peer, connection, prelude.seq, running=True)
        return True

    def _make_refusal(self) -> Failure | None:
        if self.draining:
            return Failure("draining", "hub", "the hub is shutting down and takes no new sessions")
        if len(self._links) >= self._sessions_max:
            text = (
                f"the hub already has sessions_max={self._sessions_max} sessions; close one, or wait for a lease to end"
            )
            return Failure("limit", "hub", text)
        return None

    def _heartbeat(self, peer: bytes, connection: int, prelude: Prelude) -> None:
        link = self._links.get(prelude.token)
        reply = HeartbeatReply("unknown")
        if link is not None:
            self._heard(link, peer, connection, prelude.token)
            if prelude.seq <= link.seq:
                reply = self._running(prelude.token) if link.running else HeartbeatReply("answered")
        self._send(peer, Prelude(REPLY | Op.HEARTBEAT, self.hub_id, prelude.token, prelude.seq), reply)

    def _heard(self, link: _Link, peer: bytes, connection: int, token: bytes) -> None:
        link.peer, link.connection = peer, connection
        self.leases.pop(token, None)

    # --- out ------------------------------------------------------------------------------------------------------

    def answer(self, request: Incoming, message: Any, frames: Sequence[Frame] = ()) -> None:
        """Send the one reply to ``request``; of a session's request it is kept until the next request arrives.

        The frames are sent as they are: who gives views of changing memory must leave it be until the session's
        next request.
        """
        self._reply(request, REPLY | request.op, message, frames)

    def fail(self, request: Incoming, failure: Failure) -> None:
        """Send a failure as the one reply to ``request``."""
        self._reply(request, REPLY | Op.FAILURE, failure, ())

    def _reply(self, request: Incoming, op: int, message: Any, frames: Sequence[Frame]) -> None:
        link = self._links.get(request.token) if request.op in SESSION_OPS else None
        prelude = Prelude(op, self.hub_id, request.token, request.seq)
        if link is None or link.seq != request.seq:
            self._send(request.peer, prelude, message, frames)
            return
        link.running = False
        link.reply = self._send(link.peer, prelude, message, frames)

    def _refuse(self, peer: bytes, prelude: Prelude, failure: Failure) -> None:
        self.refused += 1
        self._send(peer, Prelude(REPLY | Op.FAILURE, self.hub_id, prelude.token, prelude.seq), failure)

    def _send(self, peer: bytes, prelude: Prelude, message: Any, frames: Sequence[Frame] = ()) -> Frames:
        head = prelude.pack()
        reply = [head if isinstance(message, messages.Done) else head + messages.pack(message), *frames]
        self.outgoing.append((peer, reply))
        return reply

    def goodbye(self, token: bytes, why: Failure) -> None:
        """Tell a session's client, unasked, that the hub ends the session."""
        link = self._links.get(token)
        if link is not None:
            self._send(link.peer, Prelude(Op.GOODBYE, self.hub_id, token, 0), why)

    # --- sessions and leases --------------------------------------------------------------------------------------

    def forget(self, token: bytes) -> None:
        """Drop a session that has ended; later requests for it are told ``session_lost``, save a repeated last one."""
        link = self._links.pop(token, None)
        self.leases.pop(token, None)
        if link is None:
            return
        if link.reply is not None and len(link.reply) > 1:
            link.reply = None  # its frames are views of memory that the session had
        self._ended[token] = link
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def peers_of(self, connection: int) -> list[tuple[bytes, bytes]]:
        """``(token, peer)`` of the sessions last heard of on this connection."""
        return [(token, link.peer) for token, link in self._links.items() if link.connection == connection]

    def sessions_of(self, peer: bytes) -> list[bytes]:
        """Tokens of the sessions whose client was last heard as this peer."""
        return [token for token, link in self._links.items() if link.peer == peer and token not in self.leases]

    def peer_of(self, token: bytes) -> bytes | None:
        """Where the session's client was last heard, or None where there is no such session."""
        link = self._links.get(token)
        return None if link is None or token in self.leases else link.peer

    def connection_lost(self, token: bytes, now_s: float) -> None:
        """The session's client is gone: its lease runs from now on."""
        self.leases[token] = now_s + self._lease_s

    def expired(self, now_s: float) -> list[bytes]:
        """Tokens of the sessions whose lease has run out."""
        return [token for token, until_s in self.leases.items() if until_s <= now_s]

    def next_expiry_s(self) -> float | None:
        """When the first lease runs out, if one is running."""
        return min(self.leases.values(), default=None)

    def leased(self, token: bytes) -> bool:
        """Whether the session's client is away and its lease is running."""
        return token in self.leases


def _read_request(op: Op, frames: Frames) -> Any:
    if len(frames) > FRAMES_MAX:
        raise codec.DecodeError(f"{len(frames)} frames where at most {FRAMES_MAX} are accepted")
    body = memoryview(frames[0])[PRELUDE.size :]
    return Step(bytes(body)) if op == Op.STEP else messages.unpack(messages.REQUESTS[op], body)


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
    speak_s: float  # when to ask after it next
    lost: bool = False  # the hub does not have it, or its reply went astray: send it again


class ClientProtocol:
    """The client's half: one connection, at most one pending request, at most one session.

    Attributes:
        hub_id: the hub's id, 0 until it is known.
        dropped: how many late or foreign replies were thrown away.
        progress: what the hub said last of the pending request, until somebody takes it away.
        answer: the reply to the last request, until the next one; an interrupt may keep it from who waits for it.
    """

    def __init__(self, token: bytes = NO_SESSION, reconnect_s: float = RECONNECT_S) -> None:
        self.hub_id = 0
        self.token = token
        self.dropped = 0
        self.progress: HeartbeatReply | None = None
        self.answer: Reply | None = None
        self._session_seq = 0
        self._ticket = 0
        self._pending: _Pending | None = None
        self._reconnect_s = reconnect_s
        self._heard_s: float | None = None
        self._away_since_s: float | None = None
        self._refused_since_s: float | None = None
        self._loss = ""

    @property
    def pending(self) -> Op | None:
        """The op of the request that waits for its reply."""
        return None if self._pending is None or self.answer is not None else self._pending.op

    def request(self, op: Op, message: Any, frames: Sequence[Frame], now_s: float) -> Frames:
        """The frames of a new request, which is pending from now on. ``Step`` and the arrays travel as they are."""
        if self.pending is not None:
            raise RuntimeError(f"{self.pending.name} is pending")
        if op in SESSION_OPS:
            self._session_seq += 1
            token, seq = self.token, self._session_seq
        else:
            self._ticket += 1
            token, seq = NO_SESSION, self._ticket
        body = message.codes if op == Op.STEP else messages.pack(message)
        sent = [Prelude(op, self.hub_id, token, seq).pack() + body, *frames]
        self.answer = None
        self._pending = _Pending(op, token, seq, sent, now_s + HEARTBEAT_S)
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
        prelude = Prelude.unpack(frames[0] if frames else b"")
        self._heard_s, self._away_since_s, self._refused_since_s = now_s, None, None
        op, pending = prelude.op & ~REPLY, self._pending
        if self.hub_id and prelude.hub_id != self.hub_id:
            self._loss = "another hub answers at its address"
            return None
        if op == Op.GOODBYE and prelude.token == self.token:
            self._loss = _read(Op.FAILURE, memoryview(frames[0])[PRELUDE.size :]).message
            return None
        if pending is None or (prelude.token, prelude.seq) != (pending.token, pending.seq) or not prelude.op & REPLY:
            self.dropped += 1
            return None
        body = memoryview(frames[0])[PRELUDE.size :]
        if op == Op.HEARTBEAT:
            self._heartbeat(body)
            return None
        if op not in (pending.op, Op.FAILURE):
            raise RemoteProtocolError(f"a reply with op {op} to a {pending.op.name}")
        kind = messages.REPLIES[op]
        message = kind() if kind is messages.Done else _read(op, body)
        if op == Op.HELLO:
            self.hub_id = prelude.hub_id
        self.answer = Reply(pending.op, message, frames[1:])
        self._pending = None
        return self.answer

    def _heartbeat(self, body: Frame) -> None:
        assert self._pending is not None
        found = _read(Op.HEARTBEAT, body)
        self.progress = found if found.phase else None
        if found.state != "running":
            self._pending.lost, self._pending.speak_s = True, float("-inf")

    def tick(self, now_s: float) -> list[Frames]:
        """What to send now: the pending request once more, or a question after it."""
        pending = self._pending
        if pending is None or now_s < pending.speak_s:
            return []
        pending.speak_s = now_s + HEARTBEAT_S
        if pending.lost or pending.token == NO_SESSION:
            pending.lost = False
            return [pending.frames]
        question = Prelude(Op.HEARTBEAT, self.hub_id, pending.token, pending.seq).pack()
        return [[question + messages.pack(messages.HeartbeatRequest())]]

    def next_tick_s(self, now_s: float) -> float:
        """How many seconds from now ``tick`` has something to say, at the latest."""
        if self._pending is None:
            return HEARTBEAT_S
        return max(0.0, min(HEARTBEAT_S, self._pending.speak_s - now_s))

    # --- the transport ----------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """The transport is connected (again): the next tick asks after the pending request at once."""
        self._away_since_s = self._refused_since_s = None
        if self._pending is not None:
            self._pending.speak_s = float("-inf")

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

    def silent_s(self, now_s: float) -> float:
        """For how long a pending request has heard nothing from the hub, not even that it runs."""
        return 0.0 if self._pending is None or self._heard_s is None else now_s - self._heard_s

    def loss(self, now_s: float) -> str:
        """Why the hub must be taken for lost, or an empty string."""
        if self._loss or not self.hub_id:  # a hub not met yet may still be starting: the caller's timeout decides
            return self._loss
        if self._refused_since_s is not None and now_s - self._refused_since_s >= REFUSED_S:
            return f"connections to its address were refused for {REFUSED_S:.0f} s"
        away_since_s = self._heard_s if self._away_since_s is None else self._away_since_s
        if self._pending is not None and away_since_s is not None and now_s - away_since_s >= self._reconnect_s:
            return f"it has not been reachable for reconnect_timeout={self._reconnect_s:g} s"
        return ""


def _read(op: int, body: Frame) -> Any:
    try:
        return messages.unpack(messages.REPLIES[op], body)
    except codec.DecodeError as error:
        raise RemoteProtocolError(f"a malformed {Op(op).name} reply: {error}") from error
