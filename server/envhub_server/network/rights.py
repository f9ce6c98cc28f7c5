"""Rights and quotas of each client. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from msgspec import Struct

from envhub.options import Bytes, Count
from envhub.protocol.messages import Op

Right = Literal["observe", "use", "deploy", "admin"]  # each has those before it
RIGHTS = get_args(Right)

_OBSERVERS = frozenset([Op.HELLO, Op.HEARTBEAT, Op.LIST, Op.STATS, Op.HEALTH, Op.SESSIONS, Op.OBSERVE])


class Quotas(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on what one client may use of a hub at a time."""

    sessions_max: Count = 8
    envs_max: Count = 2048
    workers_max: Count = 256
    arena_bytes_max: Bytes = 1 << 30
    connections_max: Count = 16
    makes_per_minute_max: Count = 60


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
        """True if the client may pass any arguments to envs, and factories where the hub takes them."""
        return self.right in ("deploy", "admin")

    @property
    def administers(self) -> bool:
        """True if the sessions of all are the client's, which it may call by their names."""
        return self.right == "admin"

    def owns(self, owner: str) -> bool:
        """True if a session of this owner is the client's to see and to take over."""
        return owner == self.name or self.administers

    def over_quota(self, name: str, has: int, wants: int, limit: int) -> str:
        """The reason why the client may not have this many more; empty if it may."""
        if has + wants <= limit:
            return ""
        return f"{self.name} has {has} and wants {wants} more, of {name}_max={limit} of its key"


OWN_USER = Holder("", "admin", None)
ANYBODY = Holder("", "use", None)  # a client without a key, of an address that wants none
