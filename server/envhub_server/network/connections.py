"""The connections of a hub: who is behind each, and which of them are ended.

Pure: libzmq's monitor says which connections there are, and each message by which one it came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from envhub_server.network.rights import Holder

HELLO_S = 10.0  # for the first message of a new connection
MALFORMED_MAX = 3  # messages of a connection that cannot be read
GONE_S = 1.0  # for the hub to read what a connection had sent when it ended
GONE_MAX = 1024


@dataclass
class KnownConnection:
    """What is known of one connection."""

    silent_until_s: float  # when it is ended unless a message has come; infinity once one has
    peer: bytes = b""  # its routing id, once it has sent a message
    origin: str = ""  # where its peer is, once it has sent a message
    key: bytes = b""  # of its client; empty where it needs none, or has sent nothing
    holder: Holder | None = None  # None until it has sent a message
    refused: bool = False  # whether its client was told that it has too many
    malformed: int = 0


class Connections:
    """By the descriptor of each connection, what is known of it. Methods return the descriptors to end, or say so."""

    def __init__(self) -> None:
        self._known: dict[int, KnownConnection] = {}
        self._gone: dict[bytes, float] = {}  # peers whose connections ended, and until when their messages may come

    def __len__(self) -> int:
        return len(self._known)

    def accepted(self, descriptor: int, now_s: float) -> None:
        """Note a new connection."""
        self._known[descriptor] = KnownConnection(now_s + HELLO_S)

    def ended(self, descriptor: int, now_s: float) -> None:
        """Forget a connection; messages that it sent before may still come."""
        known = self._known.pop(descriptor, None)
        if known is not None and known.peer:
            while len(self._gone) >= GONE_MAX:
                del self._gone[next(iter(self._gone))]
            self._gone[known.peer] = now_s + GONE_S

    def of(self, peer: bytes, descriptor: int, now_s: float) -> KnownConnection | None:
        """The connection of a message; None where it has ended, and its number may be another's by now."""
        known = self._known.get(descriptor)
        if known is None or self._gone.get(peer, 0.0) > now_s:
            return None
        known.peer = known.peer or peer
        return known if known.peer == peer else None

    def who(self, descriptor: int) -> tuple[str, str]:
        """The name of its client, and where that is, as far as is known."""
        known = self._known.get(descriptor)
        return ("", "") if known is None or known.holder is None else (known.holder.name, known.origin)

    def lack(self, holder: Holder) -> str:
        """Why this client may not have one connection more; empty if it may."""
        others = sum(each.holder is not None and each.holder.name == holder.name for each in self._known.values())
        if holder.quotas is None or others < holder.quotas.connections_max:
            return ""
        return f"{holder.name} has {others} connections, of connections_max={holder.quotas.connections_max}"

    def silent(self, now_s: float) -> list[int]:
        """The connections that have sent nothing for too long."""
        found = [descriptor for descriptor, each in self._known.items() if each.silent_until_s <= now_s]
        for descriptor in found:
            self._known[descriptor].silent_until_s = math.inf
        return found

    def next_s(self) -> float:
        """When ``silent`` is to be called next."""
        return min((each.silent_until_s for each in self._known.values()), default=math.inf)

    def changed(self, holders: Mapping[bytes, Holder]) -> list[int]:
        """The connections of clients whose keys are not among these any more, or have other rights by now."""
        found = [(descriptor, each) for descriptor, each in self._known.items() if each.key and each.holder is not None]
        return [descriptor for descriptor, each in found if _right(holders.get(each.key)) != _right(each.holder)]


def _right(holder: Holder | None) -> str:
    return "" if holder is None else holder.right
