"""The rows of a vector env that are on one hub."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import numpy as np

from envhub.protocol.client import Reply
from envhub.protocol.messages import Observe, Observed
from envhub_client.batch import Batch
from envhub_client.connection.connection import Connection
from envhub_client.lanes.base import HubLane
from envhub_client.session.maker import SessionMaker


class HubPart:
    """A session on one hub, which has some rows of a larger vector env.

    Attributes:
        hub: the name of the hub.
        rows: the numbers of its rows, without a gap.
        take: takes them out of an array.
        maker: of its session.
        lane: steps its rows, which are numbered from 0 there.
    """

    def __init__(self, hub: str, rows: range, maker: SessionMaker, lane: HubLane) -> None:
        self.hub = hub
        self.rows = rows
        self.take: Callable[[np.ndarray], np.ndarray] = itemgetter(slice(rows.start, rows.stop))
        self.maker = maker
        self.lane = lane

    @property
    def connection(self) -> Connection:
        """The connection to the hub."""
        return self.maker.connection

    def moved(self, by: int) -> HubPart:
        """The same session, with rows whose numbers are greater by ``by``."""
        return HubPart(self.hub, range(self.rows.start + by, self.rows.stop + by), self.maker, self.lane)

    def numbered(self, batch: Batch) -> Batch:
        """The batch with the numbers that its rows have in the larger vector env."""
        first = self.rows.start
        if not first or not (batch.rows or batch.groups or batch.env_ids is not None):
            return batch
        return batch._replace(
            rows=[(row + first, blob) for row, blob in batch.rows],
            groups=[group._replace(rows=group.rows + first) for group in batch.groups],
            env_ids=None if batch.env_ids is None else batch.env_ids + first,
        )

    def observe_request(self) -> Observe:
        """The request for the rows' last observations."""
        return Observe(self.connection.protocol.token, described=True)

    def observed(self, reply: Reply) -> tuple[Observed, list[np.ndarray]]:
        """The message of a reply to OBSERVE, and the rows' last observations in it, an array for each leaf.

        Raises:
            RemoteProtocolError: they are not of these rows.
        """
        count, leaves = len(self.rows), self.lane.leaves
        try:
            if (len(reply.message.steps), len(reply.message.given)) != (count, count):
                raise ValueError("observations of other envs")
            arrays = [
                np.frombuffer(frame, leaf.dtype).reshape((count, *leaf.shape))
                for frame, leaf in zip(reply.frames, leaves, strict=True)
            ]
        except ValueError as error:
            raise self.connection.breach(f"an OBSERVE reply does not fit the session: {error}") from error
        return reply.message, arrays
