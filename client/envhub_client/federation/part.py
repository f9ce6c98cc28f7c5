"""The rows of a vector env that are on one hub, and their part of a request for all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TypeVar

import numpy as np

from envhub.errors import HubTimeout
from envhub.protocol.messages import Call, Reset, SetAttr, pack_rows, unpack_rows
from envhub_client.connection.connection import Connection
from envhub_client.deadline import Deadline
from envhub_client.lanes.base import Batch, Lane
from envhub_client.session.maker import SessionMaker

LOOK_S = 0.25  # between looks at whether a hub is out of reach, or what it does is wanted no more
SILENCE_S_MIN = 2.5  # of a hub that is asked every second

Result = TypeVar("Result")


class HubPart:
    """A session on one hub, which has some rows of a larger vector env."""

    def __init__(self, hub: str, rows: range, maker: SessionMaker, lane: Lane) -> None:
        self.hub, self.maker = hub, maker  # by its name; of the session
        self.rows = rows  # without a gap
        self.lane = lane  # where they are numbered from 0
        self.take: Callable[[np.ndarray], np.ndarray] = itemgetter(slice(rows.start, rows.stop))  # out of an array

    @property
    def connection(self) -> Connection:
        return self.maker.connection

    def moved(self, by: int) -> HubPart:
        return HubPart(self.hub, range(self.rows.start + by, self.rows.stop + by), self.maker, self.lane)

    def positions(self, env_ids: np.ndarray) -> np.ndarray:
        """The positions of this part's rows among these."""
        return np.flatnonzero((self.rows.start <= env_ids) & (env_ids < self.rows.stop))

    def numbered(self, batch: Batch) -> Batch:
        """The batch with the numbers that its rows have in the larger vector env."""
        first = self.rows.start
        return batch._replace(
            rows=[(row + first, blob) for row, blob in batch.rows],
            groups=[group._replace(rows=group.rows + first) for group in batch.groups],
            env_ids=None if batch.env_ids is None else batch.env_ids + first,
        )


def reset_of(reset: Reset, rows: range) -> Reset | None:
    """The reset of these rows, numbered from 0; None if its mask leaves all of them out."""
    mask = reset.mask[rows.start : rows.stop]
    if reset.mask and not any(mask):
        return None
    own = slice(rows.start, rows.stop)
    mask = [] if all(mask) else mask
    return replace(reset, seeds=reset.seeds[own], mask=mask, options_each=reset.options_each[own])


def call_of(call: Call, rows: range) -> Call | None:
    """The call of these rows, numbered from 0; None if it names some rows, and none of them."""
    if not call.rows:
        return call
    named = [row - rows.start for row in call.rows if row in rows]
    return replace(call, rows=named) if named else None


def set_attr_of(message: SetAttr, rows: range, num_envs: int) -> SetAttr | None:
    """The attribute of these rows of ``num_envs``, numbered from 0; None if it names some rows, and none of them."""
    named = message.rows or range(num_envs)
    at = [n for n, row in enumerate(named) if row in rows]
    if not at:
        return None
    values = message.values if len(message.values) == 1 else [message.values[n] for n in at]
    return SetAttr(message.name, values, [named[n] - rows.start for n in at] if message.rows else [])


def out_of_band_of(packed: bytes, parts: Sequence[range]) -> Iterator[bytes]:
    """The packed actions of the rows of each part, numbered from 0."""
    entries = unpack_rows(packed, parts[-1].stop)
    for rows in parts:
        yield pack_rows((row - rows.start, bytes(blob)) for row, blob in entries if row in rows)


def while_in_reach(
    connections: Callable[[], Iterable[Connection]],
    silence_s_max: float,
    timeout: float | None,
    wait: Callable[[float | None], Result],
) -> Result:
    """Wait by ``wait``; raises ``HubLost`` once one of these hubs is out of reach, or silent for too long."""
    deadline = None if timeout is None else Deadline(timeout)
    while True:
        try:
            return wait(LOOK_S if deadline is None else min(LOOK_S, deadline.left_s()))
        except HubTimeout:
            for connection in connections():
                connection.check_reach(silence_s_max)
            if deadline is not None and not deadline.left_s():
                raise
