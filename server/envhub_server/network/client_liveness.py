"""Connections of the sessions' clients; the lease of a session runs from when its client is lost.

libzmq reports a connection that ends. It does not report every connection that goes silent: libzmq (4.3.5) forgets the
TTL of a client's ZMTP heartbeat at the client's next message, until the next heartbeat. So this module asks the kernel
how long ago each connection last received data: a client that lives sends heartbeats, however busy its program is. For
a client on this machine the kernel says whether its process is stopped.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from envhub.protocol.hub import HubProtocol
from envhub.protocol.prelude import BEATS_MAX
from envhub_server.log import Logger
from envhub_server.network import network_peer

CHECK_S = 0.3  # how often the kernel is asked

# A monitor reports the descriptor of an ended connection, which another connection may have by now, and it reports
# before the ROUTER itself knows. So the peers that used the descriptor are probed at once and again.
SUSPICION_S = (0.0, 0.02, 0.1, 1.0)

_LAST_DATA_RECV = struct.Struct("=52xI")  # of Linux's struct tcp_info, in milliseconds
_UCRED = struct.Struct("3i")

log = Logger("envhub.hub")


def silent_s(descriptor: int) -> float:
    """The seconds since the peer of this connection last sent data; 0 where they are not known.

    For a peer on this machine the result is infinity if its process is stopped, else 0. libzmq owns the descriptor: it
    may be closed by now, or be another connection's; ``ClientLiveness.ended`` corrects the mistakes that follow.
    """
    try:
        with network_peer.copied(descriptor) as connection:
            if connection.family == socket.AF_UNIX:
                pid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
                return math.inf if _stopped(pid) else 0.0
            tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.size)
            return float(_LAST_DATA_RECV.unpack(tcp_info)[0]) / 1000
    except (OSError, struct.error):
        return 0.0


def _stopped(pid: int) -> bool:
    """True if this process is stopped; False for pid 0, which stands for a process of another namespace."""
    return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class ClientLiveness:
    """Finds the clients of one hub's sessions that are lost or back."""

    def __init__(self, protocol: HubProtocol, lease_s: float, silence_s: Callable[[int], float] = silent_s) -> None:
        """Report clients to ``protocol``; ``lease_s`` is for the log."""
        self._protocol = protocol
        self._lease_s = lease_s
        self._silence_s = silence_s
        self._suspects: list[tuple[float, bytes, bytes]] = []  # when to probe which session's peer
        self._silent: dict[bytes, int] = {}  # by session whose lease runs for silence: its connection
        self._check_s = math.inf

    @property
    def next_s(self) -> float:
        """Time of the next calls of ``suspects`` and ``check``."""
        return min([self._check_s, *(at_s for at_s, _, _ in self._suspects)])

    def ended(self, connection: int, now_s: float) -> None:
        """Report that the connection with this descriptor has ended."""
        self._silent = {token: silent for token, silent in self._silent.items() if silent != connection}
        for token, peer in self._protocol.connection_ended(connection):
            self.suspect(token, peer, now_s, SUSPICION_S)

    def suspect(self, token: bytes, peer: bytes, now_s: float, delays_s: Sequence[float] = (0.0,)) -> None:
        """Have the session's peer probed after each of these times."""
        self._suspects += [(now_s + delay_s, token, peer) for delay_s in delays_s]

    def heard_late(self, peer: bytes, now_s: float) -> None:
        """Report a message whose connection had ended when it was read: its end is not reported once more."""
        suspected = {(token, of) for _, token, of in self._suspects}
        for token in self._protocol.sessions_of(peer):
            if (token, peer) not in suspected:
                self.suspect(token, peer, now_s, SUSPICION_S)

    def suspects(self, now_s: float) -> Iterator[tuple[bytes, bytes]]:
        """Session and peer of each client to probe now; the caller reports one that cannot be reached by ``lost``."""
        due = [suspect for suspect in self._suspects if suspect[0] <= now_s]
        self._suspects = [suspect for suspect in self._suspects if suspect[0] > now_s]
        for _, token, peer in due:
            if self._protocol.peer_of(token) == peer:
                yield token, peer

    def lost(self, token: bytes, now_s: float) -> None:
        """Report that the session's client was probed and could not be reached."""
        self._suspects = [suspect for suspect in self._suspects if suspect[1] != token]
        self._lose(token, now_s, "its connection has ended")

    def check(self, now_s: float, beats_s: Mapping[bytes, float], at_once: bool = False) -> None:
        """Find silent clients, if it is time to, or ``at_once``.

        ``beats_s`` has the heartbeat interval of each session's client, 0 for no heartbeats.
        """
        if now_s < self._check_s and not at_once:
            return
        limits_s = {token: BEATS_MAX * beat_s for token, beat_s in beats_s.items() if beat_s > 0}
        silent_s = [self._check_one(token, limit_s, now_s) for token, limit_s in limits_s.items()]
        self._silent = {
            token: connection for token, connection in self._silent.items() if token in self._protocol.leases
        }
        # The first time at which a client can be over its limit; soon, if one is over it now, because it may come back.
        left_s = [limit_s - client_s for limit_s, client_s in zip(limits_s.values(), silent_s, strict=True)]
        self._check_s = now_s + max(CHECK_S, min(left_s)) if left_s else math.inf

    def check_soon(self, now_s: float) -> None:
        """Check soon, since there is a new session."""
        self._check_s = min(self._check_s, now_s + CHECK_S)

    def _check_one(self, token: bytes, limit_s: float, now_s: float) -> float:
        """Report a client as lost or back; returns the seconds for which it has been silent."""
        connection = self._protocol.connection_of(token)
        if connection < 0:
            return 0.0
        silent_s = self._silence_s(connection)
        silent = silent_s > limit_s
        if silent and token not in self._protocol.leases:
            self._silent[token] = connection
            self._lose(token, now_s, "nothing came from it any more")
        elif not silent and self._silent.get(token) == connection:
            self._protocol.connection_back(token)
            log.info("client_back", session=token.hex()[:8])
        return silent_s

    def _lose(self, token: bytes, now_s: float, why: str) -> None:
        self._protocol.connection_lost(token, now_s)
        # Event: A session's client is out of reach: the lease of the session begins.
        log.warning("client_lost", session=token.hex()[:8], why=why, lease_s=self._lease_s)
