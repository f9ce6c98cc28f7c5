"""Messages of clients: frames in, requests out; replies in, frames out."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import zmq

from envhub.protocol import prelude
from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Failure, Op
from envhub.transport import sockets
from envhub.transport.sockets import Router
from envhub_server.hub.connection_supervisor import ConnectionSupervisor
from envhub_server.hub.directory import Directory
from envhub_server.log import Logger
from envhub_server.loop import Loop
from envhub_server.network.access import Access
from envhub_server.network.connections import OWN_USER, Holder

DISCARDED_FRAMES_MAX = 1000  # in one turn, some milliseconds, so that workers and deadlines do not wait
STEP_FRAME_BYTES_MAX = 1024  # of a first frame that may be the one that a session waits for

_UNKNOWN = object()  # a peer of which no message was read
_OF_EARLIER_HUB = "it is of the hub that was at this address before"

log = Logger("envhub.hub")


class Gateway:
    """Reads requests and sends replies. It owns a message that is being discarded, and the count of requests."""

    def __init__(
        self,
        router: Router,
        protocol: HubProtocol,
        access: Access,
        connections: ConnectionSupervisor,
        directory: Directory,
        loop: Loop,
    ) -> None:
        self._router, self._protocol, self._access = router, protocol, access
        self._connections, self._directory, self._loop = connections, directory, loop
        self._entries: dict[bytes, Any] = access.entries  # by peer, what the proxy has of its connection
        self._disconnected = access.connections.disconnected
        self._discarding_s: float | None = None  # since when the next frames are of a message with too many of them
        self.requests = 0  # how many requests were read; HEARTBEAT, which only asks after one, does not count

    # --- in -----------------------------------------------------------------------------------------------------------

    def receive(self) -> tuple[Incoming, Holder] | None:
        """Read a message; returns its request, with the client that sent it, if it is to be carried out.

        The client of the next STEP of a session is not looked up: it is the one that the session belongs to.
        """
        if self._discarding_s is not None:
            self._discard(self._discarding_s)
            return None
        router = self._router.socket
        try:
            peer = sockets.receive_peer(router)
        except zmq.Again:  # what was signalled was no message
            return None
        frames = sockets.receive(router, prelude.FRAMES_MAX)
        if self._access.proxy is not None:
            entry = self._entries.get(peer, _UNKNOWN)
            if entry is _UNKNOWN:
                self._tell_proxy(peer, frames)
            elif entry is not None:
                entry.read(len(frames), sum(map(len, frames)))
        if frames[-1].more:
            self._refuse_frames(peer, frames)
            return None
        if self._disconnected and self._disconnected.get(peer, 0.0) > self._loop.clock.now_s():
            return None  # libzmq had it before the hub ended the connection
        first, *others = map(sockets.view, frames)
        if len(first) <= STEP_FRAME_BYTES_MAX:
            step = self._protocol.receive_step(peer, bytes(first), others)
            if step is not None:
                self.requests += 1
                return step, OWN_USER
        return self._receive_other(peer, frames, [first, *others])

    def _receive_other(
        self, peer: bytes, frames: Sequence[zmq.Frame], buffers: Sequence[Any]
    ) -> tuple[Incoming, Holder] | None:
        """Read a message that is not the next STEP of a session; refuse it if its client is not let in."""
        now_s = self._loop.clock.now_s()
        connection = sockets.connection_of(frames)
        holder, why = self._access.holder(peer, frames, now_s)
        if why:
            self._connections.update()
            self._connections.end(self._access.refused(peer, connection, why, now_s))
            self._protocol.refuse(peer, [buffers[0]], Failure("limit", "hub", why))
            return None
        malformed, not_permitted = self._protocol.malformed, self._protocol.failures["not_permitted"]
        incoming = self._protocol.receive(peer, connection, [*buffers], holder.name, holder.may(Op.STEP))
        if self._protocol.malformed > malformed:
            self._connections.update()
            self._connections.end(self._access.malformed(peer, connection, now_s))
        if self._protocol.failures["not_permitted"] > not_permitted:
            log.warning(
                "request_refused", **self._access.who(holder, peer), why="its key lets it observe only", audit=True
            )
        self._note_sessions(peer, holder)
        if self._access.connections.of(peer, connection, now_s) is None:
            self._connections.heard_late(peer)
        if incoming is None:
            return None
        self.requests += incoming.op is not Op.HEARTBEAT
        return incoming, holder

    def _note_sessions(self, peer: bytes, holder: Holder) -> None:
        protocol = self._protocol
        for op, token in protocol.foreign:
            self._directory.note_foreign(peer, holder, op, token)
        for token in protocol.stale:
            self._directory.note_unknown(peer, token, holder, _OF_EARLIER_HUB)
        for token in protocol.returned:
            # Event: A session's client is heard again: its lease ends.
            log.info("client_back", session=token.hex()[:8])
        for notes in (protocol.foreign, protocol.stale, protocol.returned):
            notes.clear()

    def _tell_proxy(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Tell the proxy that a message was read, of a peer that may be one of its clients."""
        if not self._access.read(peer, frames, self._loop.clock.now_s()):
            self._connections.update()  # the message came before it was read that its connection was accepted
            self._access.read(peer, frames, self._loop.clock.now_s())

    def _refuse_frames(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        """End the connection that sends more frames than a message may have; those that libzmq has are thrown away."""
        self._discarding_s = now_s = self._loop.clock.now_s()
        self._protocol.malformed += 1
        self._connections.update()
        why = f"one of its messages has more than {prelude.FRAMES_MAX} frames"
        self._connections.end(self._access.ends(peer, sockets.connection_of(frames), why, now_s))

    def _discard(self, since_s: float) -> None:
        """Throw away more of the message that came at ``since_s``; until it ends, no other is read."""
        with contextlib.suppress(zmq.Again):
            if sockets.discard(self._router.socket, DISCARDED_FRAMES_MAX):
                self._discarding_s = None
        now_s = self._loop.clock.now_s()
        self._loop.clock.note(now_s, now_s - since_s)

    # --- out ----------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        outgoing = self._protocol.outgoing
        for peer, frames in outgoing:
            try:
                sockets.send(self._router.socket, [peer, *frames])
            except zmq.ZMQError as error:
                # The peer is gone or does not read. Its reply is kept, and sent when it asks after it.
                self._connections.send_failed(peer)
                # Event: A reply could not be sent; it is kept until the client asks for it.
                log.debug("reply_parked", error=str(error))
        outgoing.clear()
