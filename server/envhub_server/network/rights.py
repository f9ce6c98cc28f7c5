"""What each client may do, and how much it may have: pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from envhub.protocol.messages import Op

RIGHTS = ("observe", "use", "deploy", "admin")  # each has those before it

_OBSERVERS = frozenset([Op.HELLO, Op.HEARTBEAT, Op.LIST, Op.STATS, Op.HEALTH, Op.SESSIONS, Op.OBSERVE])


Limit = Annotated[int, msgspec.Meta(ge=0)]


class Quotas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most that one client may have of a hub at a time."""

    sessions_max: Limit = 8
    envs_max: Limit = 2048
    workers_max: Limit = 256
    arena_bytes_max: Limit = 1 << 30
    connections_max: Limit = 16
    makes_per_minute_max: Limit = 60


@dataclass(frozen=True)
class Holder:
    """Who holds a key.

    Attributes:
        name: of the client; empty for this machine's own user, who needs no key.
        right: one of ``RIGHTS``.
        quotas: None for no limit but the hub's.
    """

    name: str
    right: str = "use"
    quotas: Quotas | None = field(default_factory=Quotas)

    def may(self, op: Op) -> bool:
        """Whether the client may send this request."""
        return self.right != "observe" or op in _OBSERVERS

    @property
    def deploys(self) -> bool:
        """Whether the client may pass any arguments to envs, and factories where the hub takes them."""
        return self.right in ("deploy", "admin")

    def owns(self, owner: str) -> bool:
        """Whether a session of this owner is the client's to see and to take over."""
        return owner == self.name or self.right == "admin"


OWN_USER = Holder("", "admin", None)
ANYBODY = Holder("", "use", None)  # who has no key, and whom an address admits that wants none
