"""The clients of a hub: its addresses and their connections, the leases of sessions, and their messages."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from envhub.protocol import prelude
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure, Op
from envhub.protocol.prelude import Prelude
from envhub.transport import address, sockets
from envhub.transport.sockets import Router
from envhub_server.hub.directory import Directory
from envhub_server.log import log
from envhub_server.memory.session_memory import UNREAD_S, UnreadMemory
from envhub_server.network import connections
from envhub_server.network.access import Ends
from envhub_server.network.connections import OWN_USER, ClientLiveness, Holder
from envhub_server.network.descriptor_guard import DescriptorGuard
from envhub_server.network.listener import Listener
from envhub_server.network.proxy import ProxyHandle
from envhub_server.processes.supervisor import Supervisor

DISCARDED_FRAMES_MAX = 1000  # in one iteration, some milliseconds, so that workers and deadlines do not wait
STEP_FRAME_BYTES_MAX = 1024  # of a first frame that may be the one that a session waits for

_UNKNOWN = object()  # a peer of which no message was read
_OF_EARLIER_HUB = "it is of the hub that was at this address before"


class Gateway:
    """Lets clients in, reads requests, sends replies, ends connections, and keeps the leases.

    A session whose client is lost ends after a while, unless the client comes back. This owns the addresses, the
    process of the proxy that accepts the connections of strangers, what is known of the clients' lives, and a message
    that is being discarded; ``access`` knows the connections, the protocol the leases.
    """

    def __init__(self, router: Router, children: Supervisor, directory: Directory, unread: UnreadMemory) -> None:
        """Supervise the connections of ``router``, once it is open."""
        self._router, self._children, self._loop = router, children, children.loop
        self._directory, self._unread = directory, unread
        access, protocol = self._access, self._protocol = directory.access, directory.protocol
        self._liveness = ClientLiveness(protocol, access.silence_s, directory.name_of)
        self._ping = Prelude(Op.PING, protocol.hub_id, prelude.NO_SESSION, 0).pack()
        self._entries: dict[bytes, Any] = access.entries  # by peer, what the proxy has of its connection
        self._disconnected = access.connections.disconnected
        self._discarding_s: float | None = None  # since when the next frames are of a message with too many of them
        self.requests = 0  # how many requests were read; HEARTBEAT, which only asks after one, does not count
        self._listener = Listener(router, access.open_to_all)
        self._guard = DescriptorGuard(self._listener.shut, self._listener.open)

    # --- addresses ----------------------------------------------------------------------------------------------------

    def open(self, binds: Sequence[str]) -> list[str]:
        """Bind every address, those of ipc first, since what is bound later wants a key."""
        # Returns the addresses with their real ports; raises as ``Hub.opened``.
        listener = self._listener
        is_ipc = {text: address.parse_bind(text).is_ipc for text in binds}
        bound = {text: listener.bind(text) for text in binds if is_ipc[text]}
        if len(bound) < len(is_ipc):
            self._access.guard(self._router.context, self._router.socket)
        if self._access.zap is not None:
            self._loop.poller.register(int(self._access.zap.FD), self._admit_clients)
        bound |= {text: listener.bind(text) for text in binds if not is_ipc[text]}
        if listener.proxied:
            for listening in listener.proxied:
                self._guard.listens(listening.fileno())
            access = self._access
            access.proxy = ProxyHandle(
                self._children, access.handshake_ended, access.encrypted, access.unread_bytes_max
            )
            access.proxy.start(listener.proxied, listener.bind_unnamed())
        for text in binds:
            if not is_ipc[text]:
                self._access.prove(bound[text])
        self._plan_access()
        return [bound[text] for text in binds]

    def close(self) -> None:
        """Free the addresses; the ROUTER must be closed before."""
        self._guard.close()
        self._listener.close()
        self._access.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Note the connections that have come and gone, and answer clients that wait in their handshakes."""
        self.end(self._read_events())
        self._admit_clients()

    def end(self, ends: Ends) -> None:
        """End those of these connections that still exist, and plan the next check; peers may connect again."""
        # libzmq may close one at any time, and its descriptor is another's then; the monitor has reported the end by
        # then. So what the monitor has reported is read once the descriptor is held.
        waiting = deque(ends)
        while waiting:
            connection, why = waiting.popleft()
            try:
                copy = connections.copied(connection.descriptor)
            except OSError:  # libzmq has closed it
                continue
            with copy:
                waiting.extend(self._read_events())
                if self._access.connections.get(connection.descriptor) is not connection:
                    continue
                with contextlib.suppress(OSError):  # its peer has ended it
                    copy.shutdown(socket.SHUT_RDWR)
            self._access.connections.disconnect(connection, self._loop.clock.now_s())
            self._access.connections_ended += 1
            who = {"client": connection.client, "host": connection.origin}
            # Event: The hub ended a connection, for the reason `why`.
            log.warning("connection_ended", once_per=("client", "why"), **who, why=why, audit=True)
        # Once for all of them, because each of these looks at every connection.
        self._plan_access()
        self._plan_liveness()
        self._loop.schedule.set(self._check_descriptors, self._guard.check_s)

    def _read_events(self) -> Ends:
        """Note the connections that have come and gone; returns those that are to be ended."""
        now_s, ends = self._loop.clock.now_s(), Ends()
        for event, descriptor in self._router.events():
            match event:
                case zmq.Event.LISTENING:
                    self._guard.listens(descriptor)
                case zmq.Event.ACCEPTED:
                    self._guard.accepted(descriptor, now_s)
                    ends += self._access.accepted(descriptor, now_s)
                case _:
                    self._access.ended(descriptor, now_s)
                    self._unread.connection_ended(descriptor)
                    self._liveness.ended(descriptor, now_s)  # the caller plans
        return ends

    def _admit_clients(self, _: int = -1) -> None:
        """Answer libzmq, which asks whether a client is admitted."""
        while self._access.asked():
            self.end(self._read_events())
            if not self._access.answer(self._loop.clock.now_s()):
                break
        self._plan_access()

    # --- leases -------------------------------------------------------------------------------------------------------

    def check_soon(self) -> None:
        self._liveness.check_soon(self._loop.clock.now_s())
        self._plan_liveness()

    def _plan_liveness(self) -> None:
        self._loop.schedule.set(self._check_liveness, self._liveness.next_s)

    def _check_liveness(self) -> None:
        now_s = self._loop.clock.now_s()
        for token, peer in self._liveness.suspects(now_s):
            if not self._router.reaches(peer, self._ping):
                self._liveness.lost(token, now_s)
        self._liveness.check(now_s, self._directory.beats_s())
        self._plan_liveness()
        self._loop.schedule.set(self._expire, self._protocol.next_expiry_s())

    def _expire(self) -> None:
        now_s = self._loop.clock.now_s()
        # A client that has come back since the last check keeps its session.
        self._liveness.check(now_s, self._directory.beats_s(), at_once=True)
        for token in self._protocol.expired(now_s):
            lease_s = self._protocol.link_of(token).lease_s
            # Event: The lease of a session ran out: its envs are closed.
            log.info("session_expired", session=self._directory.name_of(token), lease_s=lease_s)
            self._directory.expire(token)
        self._loop.schedule.set(self._expire, self._protocol.next_expiry_s())

    # --- time ---------------------------------------------------------------------------------------------------------

    def plan_unread(self) -> None:
        """Plan to end the connections whose clients do not read the replies of sessions that have ended."""
        self._loop.schedule.set(self._end_unread, self._unread.next_s)

    def _end_unread(self) -> None:
        why = f"it has not read the replies of a session that ended {UNREAD_S:g} s ago"
        late = map(self._access.connections.get, self._unread.check(self._loop.clock.now_s()))
        self.end([(connection, why) for connection in late if connection is not None])
        self.plan_unread()

    def _plan_access(self) -> None:
        self._loop.schedule.set(self._check_access, self._access.next_s())

    def _check_access(self) -> None:
        self.end(self._access.check(self._loop.clock.now_s()))
        removed, self._access.removed = self._access.removed, []
        self._directory.revoke(removed)
        self._admit_clients()

    def _check_descriptors(self) -> None:
        self._guard.check(self._loop.clock.now_s())
        self._loop.schedule.set(self._check_descriptors, self._guard.check_s)

    # --- in -----------------------------------------------------------------------------------------------------------

    def receive(self) -> tuple[Incoming, Holder] | None:
        """Read a message; returns its request, with the client that sent it, if it is to be carried out."""
        # The client of the next STEP of a session is not looked up: it is the one that the session belongs to.
        if self._discarding_s is not None:
            self._discard(self._discarding_s)
            return None
        router = self._router.socket
        try:
            peer = router.recv(sockets.NOBLOCK)
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
        now_s = self._loop.clock.now_s()
        connection = sockets.connection_of(frames)
        holder, why = self._access.holder(peer, frames, now_s)
        if why:
            self.update()
            self.end(self._access.refused(peer, connection, why, now_s))
            self._protocol.refuse(peer, [buffers[0]], Failure("limit", "hub", why))
            return None
        malformed, not_permitted = self._protocol.malformed, self._protocol.failures["not_permitted"]
        incoming = self._protocol.receive(peer, connection, [*buffers], holder.name, holder.may(Op.STEP))
        if self._protocol.malformed > malformed:
            self.update()
            self.end(self._access.malformed(peer, connection, now_s))
        if self._protocol.failures["not_permitted"] > not_permitted:
            log.warning(
                "request_refused", **self._access.who(holder, peer), why="its key lets it observe only", audit=True
            )
        self._log_sessions(peer, holder)
        if self._access.connections.of(peer, connection, now_s) is None:
            self._liveness.on_late_message(peer, now_s)
            self._plan_liveness()
        if incoming is None:
            return None
        self.requests += incoming.op is not Op.HEARTBEAT
        return incoming, holder

    def _log_sessions(self, peer: bytes, holder: Holder) -> None:
        protocol = self._protocol
        for op, token in protocol.foreign:
            self._directory.log_foreign(peer, holder, op, token)
        for token in protocol.stale:
            self._directory.log_unknown(peer, token, holder, _OF_EARLIER_HUB)
        for token in protocol.returned:
            # Event: A session's client is heard again: its lease ends.
            log.info("client_back", session=self._directory.name_of(token))
        for marks in (protocol.foreign, protocol.stale, protocol.returned):
            marks.clear()

    def _tell_proxy(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        if not self._access.read(peer, frames, self._loop.clock.now_s()):
            self.update()  # the message came before it was read that its connection was accepted
            self._access.read(peer, frames, self._loop.clock.now_s())

    def _refuse_frames(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        """End the connection that sends more frames than a message may have; those that libzmq has are thrown away."""
        self._discarding_s = now_s = self._loop.clock.now_s()
        self._protocol.malformed += 1
        self.update()
        why = f"one of its messages has more than {prelude.FRAMES_MAX} frames"
        self.end(self._access.ends(peer, sockets.connection_of(frames), why, now_s))

    def _discard(self, since_s: float) -> None:
        """Throw away more of the message that came at ``since_s``; until it ends, no other is read."""
        with contextlib.suppress(zmq.Again):
            if sockets.discard(self._router.socket, DISCARDED_FRAMES_MAX):
                self._discarding_s = None
        now_s = self._loop.clock.now_s()
        self._loop.clock.add_lag(now_s, now_s - since_s)

    # --- out ----------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        outgoing = self._protocol.outgoing
        for peer, frames in outgoing:
            try:
                sockets.send(self._router.socket, [peer, *frames])
            except zmq.ZMQError as error:
                # The peer is gone or does not read. Its reply is kept, and sent when it asks after it.
                for token in self._protocol.sessions_of(peer):
                    self._liveness.suspect(token, peer, self._loop.clock.now_s())
                self._plan_liveness()
                # Event: A reply could not be sent; it is kept until the client asks for it.
                log.debug("reply_parked", error=str(error))
        outgoing.clear()
