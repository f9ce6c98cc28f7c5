"""The connections of a hub: who is behind each, and which of them are ended.

Pure: libzmq's monitor says which connections there are, and each message by which one it came.
"""

from __future__ import annotations

import math
import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from envhub.options import Bytes, Count
from envhub.protocol.hub import HubProtocol
from envhub.protocol.messages import Op
from envhub.protocol.prelude import BEATS_MAX
from envhub.transport.tcp import socket_owner, tcp_facts
from envhub_server.log import log
from envhub_server.network.proxy_page import FULL, FULL_BYTES, FULL_FRAMES, PARTIAL, PageEntry

Right = Literal["observe", "use", "deploy", "admin"]  # each has those before it
RIGHTS = get_args(Right)

_OBSERVERS = frozenset([Op.HELLO, Op.HEARTBEAT, Op.LIST, Op.STATS, Op.HEALTH, Op.STATUS, Op.OBSERVE])


class Quotas(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on what one client may use of a hub at a time."""

    sessions_max: Count = 8
    envs_max: Count = 2048
    workers_max: Count = 256
    arena_bytes_max: Bytes = 1 << 30
    connections_max: Count = 16
    makes_per_minute_max: Count = 60
    restarts_per_minute_max: Count = 60  # that the client orders


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container's user may have no name
        return str(uid)


@dataclass(frozen=True)
class Holder:
    """Holder of a key."""

    name: str  # of the client; empty for this machine's own user, who needs no key
    right: str = "use"  # one of ``RIGHTS``
    quotas: Quotas | None = field(default_factory=Quotas)  # None for no limit but the hub's

    def may(self, op: Op) -> bool:
        return self.right != "observe" or op in _OBSERVERS

    @property
    def deploys(self) -> bool:
        return self.right in ("deploy", "admin")

    @property
    def administers(self) -> bool:
        """True if the sessions of all are the client's, which it may call by their names."""
        return self.right == "admin"

    @property
    def actor(self) -> str:
        """The name of the client where it acts on a session, for its user and for the log."""
        if self.quotas is None and self.administers:
            return f"user {user_name(os.getuid())}"
        if not self.name:
            return "a client without a key"
        return f"admin {self.name}" if self.administers else f"client {self.name}"

    def owns(self, owner: str) -> bool:
        return owner == self.name or self.administers

    def quota_problem(self, name: str, has: int, wants: int) -> str:
        limit = math.inf if self.quotas is None else getattr(self.quotas, f"{name}_max")
        if has + wants <= limit:
            return ""
        return f"{self.name} has {has} and wants {wants} more, of {name}_max={limit} of its key"


OWN_USER = Holder("", "admin", None)
ANYBODY = Holder("", "use", None)  # a client without a key, of an address that wants none

HELLO_S = 10.0  # for the first message of a new connection
MALFORMED_MAX = 3  # messages of a connection that cannot be read
GONE_S = 1.0  # for the hub to read what a connection had sent when it ended
GONE_MAX = 1024
# From one check of the bytes that came by the connections and were not read to the next, and more per connection.
# Near the limit it is a share of this time, for a local peer sends 45 MiB in all of it.
UNREAD_S, UNREAD_EACH_S, UNREAD_SHARE_MIN = 0.05, 0.001, 0.05
# A connection of the proxy at its limit is ended at this check if the hub has read none of its messages since the first
# one: then what came is no whole message. By then libzmq, and the hub, have taken what the proxy had passed on.
FULL_CHECKS = 3
PROGRESS_S, PROGRESS_BYTES = 10.0, 1024  # a message that has begun brings this number of bytes within this time


@dataclass
class KnownConnection:
    """Facts of one connection."""

    descriptor: int  # which is another connection's once this one has ended
    is_others: bool  # whether its peer is a process of another user, at an address that wants no key
    silent_until_s: float  # when it is ended unless a message has come; infinity once one has
    peer: bytes = b""  # its routing id, once it has sent a message
    origin: str = ""  # where its peer is, if that is known
    key: bytes = b""  # of its client; empty where it needs none, or has sent nothing
    holder: Holder | None = None  # None until it has sent a message and is let in
    client: str = ""  # the holder's name, once it has sent a message
    refused: bool = False  # whether its client was told that it has too many
    malformed: int = 0
    entry: PageEntry | None = None  # what the proxy has of it, where it came by the proxy
    frames_read: int = 0  # at the last check
    full_checks: int = 0  # in a row at which it was at its limit, and nothing of it had been read
    progress: tuple[float, int] | None = None  # since when its message comes too slowly, and the bytes by then


class Connections(dict[int, KnownConnection]):
    """Facts of each connection, by its descriptor. Methods return the connections to end, or say so."""

    def __init__(self) -> None:
        self._gone: dict[bytes, float] = {}  # peers whose connections ended, and until when their messages may come
        # Peers whose connections the hub has ended, and until when messages may come that they had sent before.
        self.disconnected: dict[bytes, float] = {}
        self._unread_s = math.inf

    @property
    def others(self) -> bool:
        return any(each.is_others for each in self.values())

    def accepted(self, descriptor: int, now_s: float, is_others: bool = False) -> KnownConnection:
        self[descriptor] = connection = KnownConnection(descriptor, is_others, now_s + HELLO_S)
        self._unread_s = min(self._unread_s, now_s + UNREAD_S)
        return connection

    def origin(self, peer: bytes) -> str:
        return next((each.origin for each in self.values() if each.peer == peer), "")

    def has(self, client: str, origin: str) -> bool:
        """True if this client is connected; one without a key, by a connection from this place."""
        clients = (each for each in self.values() if each.holder is not None)
        return any(each.client == client and (client or each.origin == origin) for each in clients)

    def ended(self, descriptor: int, now_s: float) -> None:
        """Forget a connection; messages that it sent before may still come."""
        connection = self.pop(descriptor, None)
        if connection is not None and connection.peer:
            _remember(self._gone, connection.peer, now_s)

    def disconnect(self, connection: KnownConnection, now_s: float) -> None:
        """Note that the hub ends this connection: messages that it sent before are not to be handled any more."""
        if connection.peer:
            _remember(self.disconnected, connection.peer, now_s)

    def of(self, peer: bytes, descriptor: int, now_s: float) -> KnownConnection | None:
        """The connection of a message; None where it has ended, and its number may be another's."""
        connection = self.get(descriptor)
        if connection is None or self._gone.get(peer, 0.0) > now_s:
            return None
        connection.peer = connection.peer or peer
        return connection if connection.peer == peer else None

    def why_refused(self, holder: Holder) -> str:
        others = sum(each.holder is not None and each.holder.name == holder.name for each in self.values())
        if holder.quotas is None or others < holder.quotas.connections_max:
            return ""
        return f"{holder.name} has {others} connections, of connections_max={holder.quotas.connections_max}"

    def silent(self, now_s: float) -> list[KnownConnection]:
        silent = [each for each in self.values() if each.silent_until_s <= now_s]
        for each in silent:
            each.silent_until_s = math.inf
        return silent

    def unread(self, bytes_max: int, now_s: float) -> list[KnownConnection]:
        """The connections by which most came of those clients who have sent more than the hub may keep unread.

        libzmq limits a frame, not a message: what has come since the last message may be one that never ends.
        ``bytes_max`` is for each client of the proxy, and for all together that have sent no message yet.
        """
        clients: dict[str, list[tuple[int, KnownConnection]]] = {}
        for each in self.values():
            if each.entry is not None:
                client = "" if each.holder is None else each.holder.name
                clients.setdefault(client, []).append((each.entry.unread_bytes, each))
        totals = {client: sum(count for count, _ in counts) for client, counts in clients.items()}
        left = 1.0 - max(totals.values(), default=0) / bytes_max
        each_s = UNREAD_S * max(UNREAD_SHARE_MIN, left) + UNREAD_EACH_S * len(self)
        self._unread_s = now_s + each_s if clients else math.inf
        over = [
            (totals[client] / len(counts), counts) for client, counts in clients.items() if totals[client] > bytes_max
        ]
        return [connection for mean, counts in over for count, connection in counts if count >= mean]

    def unfinished(self, frames_max: int, now_s: float) -> list[tuple[KnownConnection, str]]:
        ends = []
        for each in self.values():
            if each.entry is None:
                continue
            state = each.entry.state
            if each.frames_read != each.entry.frames_read:
                each.frames_read, each.full_checks, each.progress = each.entry.frames_read, 0, None
            each.full_checks = each.full_checks + 1 if state & FULL else 0
            if each.full_checks == FULL_CHECKS:
                why = "it has sent too many bytes before it was let in"
                if state & FULL_FRAMES:
                    why = f"one of its messages has more than {frames_max} frames"
                elif state & FULL_BYTES:
                    why = "it has sent too many bytes of a message that does not end"
                ends.append((each, why))
            elif not state & PARTIAL or each.silent_until_s < math.inf:
                each.progress = None
            elif each.progress is None or each.entry.received >= each.progress[1] + PROGRESS_BYTES:
                each.progress = now_s, each.entry.received
            elif now_s >= each.progress[0] + PROGRESS_S:
                each.progress = math.inf, each.entry.received
                ends.append(
                    (each, f"less than {PROGRESS_BYTES} bytes of its message have come within {PROGRESS_S:g} s")
                )
        return ends

    def next_s(self) -> float:
        return min(self._unread_s, *(each.silent_until_s for each in self.values()), math.inf)

    def changed(self, holders: Mapping[bytes, Holder]) -> list[KnownConnection]:
        """The connections of clients whose keys are not among these any more, or are another's or with other rights."""
        rights = {key: (holder.name, holder.right) for key, holder in holders.items()}
        holding = ((each, each.holder) for each in self.values() if each.key)
        return [each for each, of in holding if of is not None and rights.get(each.key) != (of.name, of.right)]


def _remember(peers: dict[bytes, float], peer: bytes, now_s: float) -> None:
    """Note the peer of a connection that ends, until its messages have come; the oldest is forgotten for a new one."""
    while len(peers) >= GONE_MAX:
        del peers[next(iter(peers))]
    peers[peer] = now_s + GONE_S


def copied(descriptor: int) -> socket.socket:
    """The connection of this descriptor, which libzmq owns and may close; the caller owns the copy."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def is_others(descriptor: int) -> bool:
    """True if this tcp connection's peer is not, for certain, a process of this user on this machine."""
    try:
        connection = copied(descriptor)
    except OSError:
        return True
    with connection:
        return connection.family != socket.AF_UNIX and not _is_own(connection)


def _is_own(connection: socket.socket) -> bool:
    try:
        ends = connection.getpeername()[:2], connection.getsockname()[:2]
    except OSError:  # it has ended
        return False
    user, inode = socket_owner(connection.family, *ends) or (-1, 0)
    return user == os.getuid() and inode != 0  # an end that its process has closed has no inode, and user 0


def kernel_tells() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        with peer, server.accept()[0] as accepted:
            return not is_others(accepted.fileno())


CHECK_S = 0.3  # how often the kernel is asked

# A monitor reports the descriptor of an ended connection, which another connection may have, and it reports
# before the ROUTER itself knows. So the peers that used the descriptor are probed at once and again.
SUSPICION_S = (0.0, 0.02, 0.1, 1.0)


def silent_s(descriptor: int) -> float:
    """Seconds since the peer sent data, 0 if unknown; on this machine infinity if its process is stopped, else 0."""
    try:
        with copied(descriptor) as connection:
            if connection.family == socket.AF_UNIX:
                return math.inf if _stopped(peer_of(connection)[0]) else 0.0
            return tcp_facts(connection)[0]
    except OSError:
        return 0.0


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process, 0 if it is in another container, and the user of the peer of a Unix socket."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _stopped(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class ClientLiveness:
    """Finds the clients of one hub's sessions that are lost or back."""

    def __init__(
        self,
        protocol: HubProtocol,
        silence_s: Callable[[int], float] = silent_s,
        name_of: Callable[[bytes], str] = bytes.hex,
    ) -> None:
        """``name_of`` gives the name of the session of a token, for the log."""
        self._protocol, self._name_of = protocol, name_of
        self._silence_s = silence_s
        self._suspects: list[tuple[float, bytes, bytes]] = []  # when to probe which session's peer
        self._silent: dict[bytes, int] = {}  # by session whose lease runs for silence: its connection
        self._check_s = math.inf

    @property
    def next_s(self) -> float:
        return min([self._check_s, *(at_s for at_s, _, _ in self._suspects)])

    def ended(self, connection: int, now_s: float) -> None:
        self._silent = {token: silent for token, silent in self._silent.items() if silent != connection}
        for token, peer in self._protocol.connection_ended(connection):
            self.suspect(token, peer, now_s, SUSPICION_S)

    def suspect(self, token: bytes, peer: bytes, now_s: float, delays_s: Sequence[float] = (0.0,)) -> None:
        self._suspects += [(now_s + delay_s, token, peer) for delay_s in delays_s]

    def on_late_message(self, peer: bytes, now_s: float) -> None:
        """Report a message whose connection had ended when it was read: its end is not reported once more."""
        suspected = {(token, of) for _, token, of in self._suspects}
        for token in self._protocol.sessions_of(peer):
            if (token, peer) not in suspected:
                self.suspect(token, peer, now_s, SUSPICION_S)

    def suspects(self, now_s: float) -> Iterator[tuple[bytes, bytes]]:
        """Session and peer of each client to probe now; the caller reports one that cannot be reached by ``lost``."""
        expired = [suspect for suspect in self._suspects if suspect[0] <= now_s]
        self._suspects = [suspect for suspect in self._suspects if suspect[0] > now_s]
        for _, token, peer in expired:
            if self._protocol.peer_of(token) == peer:
                yield token, peer

    def lost(self, token: bytes, now_s: float) -> None:
        self._suspects = [suspect for suspect in self._suspects if suspect[1] != token]
        self._lose(token, now_s, "its connection has ended")

    def check(self, now_s: float, beats_s: Mapping[bytes, float], at_once: bool = False) -> None:
        if now_s < self._check_s and not at_once:
            return
        limits_s = {token: BEATS_MAX * heartbeat_s for token, heartbeat_s in beats_s.items() if heartbeat_s > 0}
        silent_s = [self._check_one(token, limit_s, now_s) for token, limit_s in limits_s.items()]
        self._silent = {
            token: connection for token, connection in self._silent.items() if token in self._protocol.leases
        }
        # The first time at which a client can be over its limit; soon, if one is over it now, because it may come back.
        left_s = [limit_s - client_s for limit_s, client_s in zip(limits_s.values(), silent_s, strict=True)]
        self._check_s = now_s + max(CHECK_S, min(left_s)) if left_s else math.inf

    def check_soon(self, now_s: float) -> None:
        self._check_s = min(self._check_s, now_s + CHECK_S)

    def _check_one(self, token: bytes, limit_s: float, now_s: float) -> float:
        connection = self._protocol.link_of(token).connection
        if connection < 0:
            return 0.0
        silent_s = self._silence_s(connection)
        silent = silent_s > limit_s
        if silent and token not in self._protocol.leases:
            self._silent[token] = connection
            self._lose(token, now_s, "nothing came from it any more")
        elif not silent and self._silent.get(token) == connection:
            self._protocol.leases.pop(token, None)
            log.info("client_back", session=self._name_of(token))
        return silent_s

    def _lose(self, token: bytes, now_s: float, why: str) -> None:
        self._protocol.connection_lost(token, now_s)
        # Event: A session's client is out of reach: the lease of the session begins.
        log.warning("client_lost", session=self._name_of(token), why=why, lease_s=self._protocol.link_of(token).lease_s)
