"""Reports of hubs: what the actor that keeps a hub says of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class HubState(str, enum.Enum):
    """State of a hub of a fleet."""

    PLACING = "placing"  # Ray has no place for it now, or is about to start it
    STARTING = "starting"
    SERVING = "serving"
    WAITING = "waiting to start again"
    STOPPED = "stopped"


@dataclass(frozen=True)
class FleetHub:
    """State of a hub of a fleet.

    Attributes:
        index: number of the hub in its fleet.
        state: a word for a person; ``serving`` if clients can connect.
        node: address of its machine; empty before it has one.
        address: where it listens, without keys; empty if it does not.
        pid: of its process; 0 without one.
        starts: number of times that its process was started, since its actor was.
        why: how its process ended the last time; empty if it has not.
        failures: number of times in a row that its process ended before it listened.
    """

    index: int
    state: str = HubState.PLACING.value
    node: str = ""
    address: str = ""
    pid: int = 0
    starts: int = 0
    why: str = ""
    failures: int = 0


class HubAccess(NamedTuple):
    """Addresses of a hub that serves, with the key of the fleet's clients.

    Attributes:
        tcp: an ``envhub://`` address, which has a secret key in it.
        ipc: of its socket, for programs of its user on its machine; empty for none.
    """

    tcp: str
    ipc: str

    def __repr__(self) -> str:
        return f"HubAccess(ipc={self.ipc!r})"
