"""Leases: a session whose client is lost ends after a while, unless the client comes back."""

from __future__ import annotations

from envhub.protocol import prelude
from envhub.protocol.hub import HubProtocol
from envhub.protocol.messages import Op
from envhub.protocol.prelude import Prelude
from envhub_server.hub.directory import Directory
from envhub_server.log import Logger
from envhub_server.loop import Loop
from envhub_server.network.access import Access
from envhub_server.network.connections import ClientLiveness
from envhub_server.network.listener import Router

log = Logger("envhub.hub")


class Leases:
    """Leases of one hub's sessions. It owns what is known of the clients' lives; the protocol has the leases."""

    def __init__(
        self, protocol: HubProtocol, access: Access, directory: Directory, router: Router, loop: Loop, lease_s: float
    ) -> None:
        """Probe clients by ``router``; ``lease_s`` is for the log."""
        self._protocol, self._directory, self._router, self._loop = protocol, directory, router, loop
        self._liveness = ClientLiveness(protocol, lease_s, access.silence_s)
        self._lease_s = lease_s
        self._ping = Prelude(Op.PING, protocol.hub_id, prelude.NO_SESSION, 0).pack()

    def check_soon(self) -> None:
        """Check the clients soon, since there is a new session."""
        self._liveness.check_soon(self._loop.clock.now_s())
        self.plan()

    def connection_ended(self, connection: int, now_s: float) -> None:
        """Suspect the clients of a connection that has ended; the caller calls ``plan``."""
        self._liveness.ended(connection, now_s)

    def send_failed(self, peer: bytes) -> None:
        """Suspect a client that cannot be sent a reply."""
        for token in self._protocol.sessions_of(peer):
            self._liveness.suspect(token, peer, self._loop.clock.now_s())
        self.plan()

    def heard_late(self, peer: bytes) -> None:
        """Suspect a client whose connection had ended when its message was read."""
        self._liveness.heard_late(peer, self._loop.clock.now_s())
        self.plan()

    def plan(self) -> None:
        """Plan the next check of the clients."""
        self._loop.schedule.set(self._check, self._liveness.next_s)

    def _check(self) -> None:
        now_s = self._loop.clock.now_s()
        for token, peer in self._liveness.suspects(now_s):
            if not self._router.reaches(peer, self._ping):
                self._liveness.lost(token, now_s)
        self._liveness.check(now_s, self._directory.beats_s())
        self.plan()
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
