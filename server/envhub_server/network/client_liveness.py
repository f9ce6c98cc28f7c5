"""Whether the clients of sessions are still there; from when one is not, its lease runs.

A connection that ends is told by libzmq. One that goes silent is not, where its client was busy: the TTL of a client's
ZMTP heartbeat is forgotten by libzmq (4.3.5) at its next message, and only begins again at the next heartbeat. So the
kernel is asked for how long nothing has come by each connection: the heartbeats of a client that lives do come, however
busy its program is. On this machine the kernel says whether the client's process is stopped.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from envhub.protocol.hub import HubProtocol
from envhub.protocol.prelude import BEATS_MAX

LOOK_S = 0.3  # how often the kernel is asked

# A monitor tells of an ended connection by a descriptor, which may be another's by now, and before the ROUTER itself
# knows: so the peers that used it are asked for, at once and again.
SUSPICION_S = (0.0, 0.02, 0.1, 1.0)

_LAST_DATA_RECV = struct.Struct("=52xI")  # of Linux's struct tcp_info, in milliseconds
_UCRED = struct.Struct("3i")

log = structlog.get_logger("envhub.hub")


def silent_s(descriptor: int) -> float:
    """For how many seconds the peer of this connection has sent nothing; 0 where that is not known.

    Of a peer on this machine only whether it is stopped is known, and then it is for ever. The descriptor is libzmq's:
    it may be closed by now, or another connection's; ``ClientLiveness.ended`` sets right what that makes wrong.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == socket.AF_UNIX:
                pid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
                return math.inf if _stopped(pid) else 0.0
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.size)
            return float(_LAST_DATA_RECV.unpack(told)[0]) / 1000
    except (OSError, struct.error):
        return 0.0


def _stopped(pid: int) -> bool:
    """Whether this process is stopped; of one in another namespace, whose number is 0, nothing is known."""
    return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class ClientLiveness:
    """Looks after the clients of one hub's sessions."""

    def __init__(
        self,
        protocol: HubProtocol,
        lease_s: float,
        silence_s: Callable[[int], float] = silent_s,
    ) -> None:
        """Tell ``protocol`` whose client is gone or back.

        Args:
            protocol: knows the sessions, and who was heard last for each.
            lease_s: for the log.
            silence_s: for how many seconds a connection has been silent.
        """
        self._protocol = protocol
        self._lease_s = lease_s
        self._silence_s = silence_s
        self._suspects: list[tuple[float, bytes, bytes]] = []  # when to see whether a session's peer is still there
        self._silent: dict[bytes, int] = {}  # the connections of sessions whose lease runs because they are silent
        self._look_s = math.inf

    @property
    def next_s(self) -> float:
        """When ``suspects`` or ``look`` has something to do."""
        return min([self._look_s, *(at_s for at_s, _, _ in self._suspects)])

    def ended(self, connection: int, now_s: float) -> None:
        """A connection with this descriptor has ended."""
        self._silent = {token: silent for token, silent in self._silent.items() if silent != connection}
        for token, peer in self._protocol.connection_ended(connection):
            self.suspect(token, peer, now_s, SUSPICION_S)

    def suspect(self, token: bytes, peer: bytes, now_s: float, delays_s: Sequence[float] = (0.0,)) -> None:
        """See, after each of these times, whether the session's peer is still there."""
        self._suspects += [(now_s + delay_s, token, peer) for delay_s in delays_s]

    def suspects(self, now_s: float) -> Iterator[tuple[bytes, bytes]]:
        """Session and peer of each client that is to be probed now; where it cannot be reached, it is ``lost``."""
        due = [suspect for suspect in self._suspects if suspect[0] <= now_s]
        self._suspects = [suspect for suspect in self._suspects if suspect[0] > now_s]
        for _, token, peer in due:
            if self._protocol.peer_of(token) == peer:
                yield token, peer

    def lost(self, token: bytes, now_s: float) -> None:
        """The session's client was probed and could not be reached."""
        self._suspects = [suspect for suspect in self._suspects if suspect[1] != token]
        self._lose(token, now_s, "its connection has ended")

    def look(self, now_s: float, beats_s: Mapping[bytes, float]) -> None:
        """See who is silent; ``beats_s`` is how often the client of each session shows a sign of life, 0 for never."""
        if now_s < self._look_s:
            return
        limits_s = {token: BEATS_MAX * beat_s for token, beat_s in beats_s.items() if beat_s > 0}
        silent_s = [self._listen(token, limit_s, now_s) for token, limit_s in limits_s.items()]
        self._silent = {token: found for token, found in self._silent.items() if self._protocol.leased(token)}
        # The first that can be silent for too long, or, where one is, soon: it may be back.
        left_s = [limit_s - for_s for limit_s, for_s in zip(limits_s.values(), silent_s, strict=True)]
        self._look_s = now_s + max(LOOK_S, min(left_s)) if left_s else math.inf

    def watch(self, now_s: float) -> None:
        """There is another session: look soon."""
        self._look_s = min(self._look_s, now_s + LOOK_S)

    def _listen(self, token: bytes, limit_s: float, now_s: float) -> float:
        """Lose a client of which nothing was heard for so long, or find one that was lost for that; for how long."""
        connection = self._protocol.connection_of(token)
        if connection < 0:
            return 0.0
        silent_s = self._silence_s(connection)
        silent = silent_s > limit_s
        if silent and not self._protocol.leased(token):
            self._silent[token] = connection
            self._lose(token, now_s, "nothing came from it any more")
        elif not silent and self._silent.get(token) == connection:
            self._protocol.connection_back(token)
            log.info("client_back", session=token.hex()[:8])
        return silent_s

    def _lose(self, token: bytes, now_s: float, why: str) -> None:
        self._protocol.connection_lost(token, now_s)
        log.warning("client_lost", session=token.hex()[:8], why=why, lease_s=self._lease_s)
