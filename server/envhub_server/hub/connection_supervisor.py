"""The connections of a hub: its addresses, who is let in, which connections are ended, and the leases of sessions."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Sequence

import zmq

from envhub.protocol import prelude
from envhub.protocol.hub import HubProtocol
from envhub.protocol.messages import Op
from envhub.protocol.prelude import Prelude
from envhub.transport import address
from envhub.transport.sockets import Router
from envhub_server.hub.directory import Directory
from envhub_server.log import Logger
from envhub_server.loop import Loop
from envhub_server.memory.session_memory import UNREAD_S, UnreadMemory
from envhub_server.network import connections
from envhub_server.network.access import Access, Ends
from envhub_server.network.connections import ClientLiveness
from envhub_server.network.descriptor_guard import DescriptorGuard
from envhub_server.network.listener import Listener
from envhub_server.network.proxy import ProxyHandle
from envhub_server.processes.supervisor import Supervisor

log = Logger("envhub.hub")


class ConnectionSupervisor:
    """Lets clients in, ends connections, runs the proxy that accepts those of strangers, and keeps the leases.

    A session whose client is lost ends after a while, unless the client comes back. This owns the addresses, the
    proxy's process, and what is known of the clients' lives; ``access`` knows the connections, the protocol the leases.
    """

    def __init__(
        self,
        router: Router,
        access: Access,
        children: Supervisor,
        directory: Directory,
        unread: UnreadMemory,
        loop: Loop,
        protocol: HubProtocol,
        lease_s: float,
        unread_bytes_max: int,
    ) -> None:
        """Supervise the connections of ``router``, once it is open; ``lease_s`` is for the log.

        A client of the proxy may have sent ``unread_bytes_max`` that the hub has not read.
        """
        self._router, self._access, self._children = router, access, children
        self._directory, self._unread, self._loop = directory, unread, loop
        self._protocol, self._lease_s, self._unread_bytes_max = protocol, lease_s, unread_bytes_max
        self._liveness = ClientLiveness(protocol, lease_s, access.silence_s)
        self._ping = Prelude(Op.PING, protocol.hub_id, prelude.NO_SESSION, 0).pack()
        self._listener: Listener | None = None
        self._guard: DescriptorGuard | None = None

    # --- addresses ----------------------------------------------------------------------------------------------------

    def open(self, binds: Sequence[str]) -> list[str]:
        """Bind every address, those of ipc first, since what is bound later wants a key.

        Returns the addresses with their real ports; raises as ``Hub.opened``.
        """
        self._listener = listener = Listener(self._router.socket, self._access.open_to_all)
        self._guard = DescriptorGuard(listener.shut, listener.open)
        is_ipc = {text: address.parse_bind(text).is_ipc for text in binds}
        bound = {text: listener.bind(text) for text in binds if is_ipc[text]}
        if len(bound) < len(is_ipc):
            self._access.guard(self._router.context, self._router.socket)
        if self._access.authenticator is not None:
            self._loop.poller.register(self._access.authenticator.descriptor, self)
        bound |= {text: listener.bind(text) for text in binds if not is_ipc[text]}
        if listener.proxied:
            for listening in listener.proxied:
                self._guard.listens(listening.fileno())
            self._access.proxy = ProxyHandle(
                self._children,
                self._loop,
                self._access.handshake_ended,
                self._access.encrypted,
                self._unread_bytes_max,
            )
            self._access.proxy.start(listener.proxied, listener.bind_unnamed())
        for text in binds:
            if not is_ipc[text]:
                self._access.bound(bound[text])
        self._plan_access()
        return [bound[text] for text in binds]

    def close(self) -> None:
        """Free the addresses; the ROUTER must be closed before."""
        if self._guard is not None:
            self._guard.close()
        if self._listener is not None:
            self._listener.close()
        self._access.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Note the connections that have come and gone, and answer clients that wait in their handshakes."""
        self.end(self._read_events())
        self._admit_clients()

    def end(self, ends: Ends) -> None:
        """End those of these connections that still exist, and plan the next check; peers may connect again.

        libzmq may close one at any time, and its descriptor is another's then; the monitor has reported the end by
        then. So what the monitor has reported is read once the descriptor is held.
        """
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
        if self._guard is not None:
            self._loop.schedule.set(self._check_descriptors, self._guard.check_s)

    def _read_events(self) -> Ends:
        """Note the connections that have come and gone; returns those that are to be ended."""
        assert self._guard is not None
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

    def on_ready(self, descriptor: int) -> None:
        """Answer libzmq, which asks whether a client is admitted."""
        self._admit_clients()

    def _admit_clients(self) -> None:
        """Answer libzmq about the clients that wait in their handshakes."""
        while self._access.asked():
            self.end(self._read_events())
            if not self._access.answer(self._loop.clock.now_s()):
                break
        self._plan_access()

    # --- leases -------------------------------------------------------------------------------------------------------

    def check_soon(self) -> None:
        """Check the clients soon, since there is a new session."""
        self._liveness.check_soon(self._loop.clock.now_s())
        self._plan_liveness()

    def send_failed(self, peer: bytes) -> None:
        for token in self._protocol.sessions_of(peer):
            self._liveness.suspect(token, peer, self._loop.clock.now_s())
        self._plan_liveness()

    def heard_late(self, peer: bytes) -> None:
        """Suspect a client whose connection had ended when its message was read."""
        self._liveness.heard_late(peer, self._loop.clock.now_s())
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
            # Event: The lease of a session ran out: its envs are closed.
            log.info("session_expired", session=token.hex()[:8], lease_s=self._lease_s)
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
        self.end(self._access.check(self._loop.clock.now_s(), self._directory.heard_peers()))
        removed, self._access.removed = self._access.removed, []
        self._directory.revoke(removed)
        self._admit_clients()

    def _check_descriptors(self) -> None:
        assert self._guard is not None
        self._guard.check(self._loop.clock.now_s())
        self._loop.schedule.set(self._check_descriptors, self._guard.check_s)
