"""The connections of a hub: who is behind each, and which of them are ended.

Pure: libzmq's monitor says which connections there are, and each message by which one it came.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from envhub_server.network.rights import Holder

HELLO_S = 10.0  # for the first message of a new connection
MALFORMED_MAX = 3  # messages of a connection that cannot be read


@dataclass
class _Connection:
    silent_until_s: float  # when it is ended unless a message has come; infinity once one has
    own: bool = False  # whether the hub's user is behind it, as the kernel says
    origin: str = ""  # where its peer is, once it has sent a message
    key: bytes = b""  # of its client; empty where it needs none, or has sent nothing
    holder: Holder | None = None  # None until it has sent a message
    refused: bool = False  # whether its client was told that it has too many
    malformed: int = 0


class Connections:
    """By the descriptor of each connection, what is known of it. Methods return the descriptors to end, or say so."""

    def __init__(self) -> None:
        self._known: dict[int, _Connection] = {}

    def accepted(self, descriptor: int, own: bool, now_s: float) -> None:
        """Note a new connection, of the hub's own user if ``own``."""
        self._known[descriptor] = _Connection(now_s + HELLO_S, own)

    def is_own(self, descriptor: int) -> bool:
        """Whether it is a connection of the hub's own user."""
        return descriptor in self._known and self._known[descriptor].own

    def ended(self, descriptor: int) -> None:
        """Forget a connection."""
        self._known.pop(descriptor, None)

    def is_new(self, descriptor: int) -> bool:
        """Whether it has sent no message yet."""
        return descriptor in self._known and self._known[descriptor].holder is None

    def who(self, descriptor: int) -> tuple[str, str]:
        """The name of its client, and where that is, as far as is known."""
        known = self._known.get(descriptor)
        return ("", "") if known is None or known.holder is None else (known.holder.name, known.origin)

    def heard(self, descriptor: int, key: bytes, holder: Holder, origin: str = "") -> str:
        """Note a message of the client with this key; returns why it is to be refused, or nothing."""
        known = self._known.get(descriptor)
        if known is None:  # it has ended, and the message was waiting
            return ""
        known.silent_until_s = math.inf
        if known.holder is None:
            others = sum(each.holder is not None and each.holder.name == holder.name for each in self._known.values())
            if holder.quotas is not None and others >= holder.quotas.connections_max:
                return f"{holder.name} has {others} connections, of connections_max={holder.quotas.connections_max}"
        known.key, known.holder, known.origin = key, holder, origin
        return ""

    def refuse(self, descriptor: int) -> bool:
        """Note that a message was refused; returns whether one was before, so that the connection is to be ended."""
        known = self._known.get(descriptor)
        before = known is not None and known.refused
        if known is not None:
            known.refused = True
        return before

    def malformed(self, descriptor: int) -> bool:
        """Note a message that cannot be read; returns whether the connection is to be ended."""
        known = self._known.get(descriptor)
        if known is None:
            return False
        known.malformed += 1
        return known.malformed >= MALFORMED_MAX

    def silent(self, now_s: float) -> list[int]:
        """The connections that have sent nothing for too long."""
        found = [descriptor for descriptor, each in self._known.items() if each.silent_until_s <= now_s]
        for descriptor in found:
            self._known[descriptor].silent_until_s = math.inf
        return found

    def next_s(self) -> float:
        """When ``silent`` is to be called next."""
        return min((each.silent_until_s for each in self._known.values()), default=math.inf)

    def removed(self, keys: Container[bytes]) -> list[int]:
        """The connections of clients whose keys are not among these any more."""
        return [descriptor for descriptor, each in self._known.items() if each.key and each.key not in keys]
