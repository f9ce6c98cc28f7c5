"""The phases of a session, its lanes and its drivers."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The state of a session."""

    __hash__ = object.__hash__  # Enum's own is a slow Python function, and every event is looked up by its phase

    BUILDING = "building"  # its workers build the envs
    MAPPING = "mapping"  # its workers map the arena
    READY = "ready"  # no request of the whole batch is pending
    MOVING = "moving"  # a reset or step is pending
    CALLING = "calling"  # a call is pending
    BROKEN = "broken"  # a worker has ended too often
    CLOSING = "closing"  # its workers close the envs and end
    ENDED = "ended"


MAKING = (Phase.BUILDING, Phase.MAPPING)
SERVING = (Phase.READY, Phase.MOVING, Phase.CALLING)
LIVE = (*MAKING, *SERVING, Phase.BROKEN, Phase.CLOSING)
OVER = (Phase.BROKEN, Phase.CLOSING, Phase.ENDED)


class LaneName(enum.Enum):
    """The client's lane to this session."""

    WIRE = "wire"  # the hub drives, for each step
    SHARED = "shared"  # the client drives, except while a request that the hub drives is pending


class Driver(enum.Enum):
    """The process that posts rows."""

    HUB = "hub"
    CLIENT = "client"
