"""The phases of a session, and who steps it."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The state of a session."""

    __hash__ = object.__hash__  # an enum's own is a Python function, and every stimulus is looked up by its phase

    BUILDING = "building"  # its workers make the envs
    MAPPING = "mapping"  # they map the arena
    READY = "ready"  # no request of the whole batch is under way
    MOVING = "moving"  # a reset or step is under way
    CALLING = "calling"  # a call is under way
    HANDING_OVER = "handing over"  # its workers move to the arena of the client that takes it over
    BROKEN = "broken"  # a worker has ended too often
    CLOSING = "closing"  # its workers close the envs and end
    ENDED = "ended"


MAKING = (Phase.BUILDING, Phase.MAPPING)
SERVING = (Phase.READY, Phase.MOVING, Phase.CALLING, Phase.HANDING_OVER)
OVER = (Phase.BROKEN, Phase.CLOSING, Phase.ENDED)


class LaneName(enum.Enum):
    """Lane of the client in this session."""

    WIRE = "wire"  # the hub drives, for each step
    SHARED = "shared"  # the client may drive, and does whenever nothing that the hub drives is under way


class Driver(enum.Enum):
    """The process that posts rows."""

    HUB = "hub"
    CLIENT = "client"
