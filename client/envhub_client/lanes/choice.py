"""Which lane a vector env takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envhub.protocol.messages import Made
from envhub.values.leaf import Leaf
from envhub_client.connection.connection import Connection
from envhub_client.lanes.wire import WireLane
from envhub_client.session.options import SessionOptions

if TYPE_CHECKING:
    from envhub_client.lanes.shared import SharedLane

    PlainLane = WireLane | SharedLane
else:
    PlainLane = WireLane


def lane(
    connection: Connection,
    made: Made,
    observations: Sequence[Leaf],
    actions: Sequence[Leaf],
    options: SessionOptions,
    compression: str,
) -> PlainLane:
    """The shared lane where it is to be had, on the hub's machine, else the wire lane.

    Args:
        connection: to the hub.
        made: what the hub said of the session.
        observations: leaves of fixed size, of one env.
        actions: leaves of one env.
        options: which may forbid the shared lane.
        compression: of the observations on the wire lane; empty for none.
    """
    wire = WireLane(connection, made.num_envs, observations, options.copy, compression)
    if options.lane == "wire" or sys.platform != "linux":
        return wire
    from envhub_client.lanes.shared import shared_lane  # of modules that only Linux has

    return shared_lane(wire, connection, made.ticket, actions) or wire
