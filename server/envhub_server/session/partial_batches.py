"""Partial batches: rows that SEND posts, and RECEIVE returns once they are done."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from envhub.arena.layout import split_share, whole_shares
from envhub.protocol.messages import Failure, Make, Receive, Send
from envhub_server.session.effects import Effects
from envhub_server.session.infos import RowInfos
from envhub_server.session.requests import refusal
from envhub_server.session.slots import SlotTable


class PartialBatches:
    """The pending partial batches.

    Attributes:
        rows_out: the number of rows that were posted and not received.
        receiving: the number of rows that RECEIVE waits for; 0 without a pending RECEIVE.
    """

    def __init__(self, make: Make, is_vector: bool, slots: SlotTable, infos: RowInfos, effects: Effects) -> None:
        self._make, self._is_vector, self._slots, self._infos, self._effects = make, is_vector, slots, infos, effects
        self.rows_out = self.receiving = 0

    def problem(self, send: Send) -> Failure | None:
        """The reason why these rows cannot be posted; None if they can."""
        shares = self._make.num_envs, len(self._slots)
        if self._is_vector and not whole_shares(send.rows, *shares):
            return refusal(split_share(*shares))
        return None

    def on_receive(self, receive: Receive) -> Failure | None:
        """Wait for the wanted number of rows, at most for all that are out; a failure if there are none."""
        if not self.rows_out:
            return refusal("no env is under way")
        self.receiving = max(1, min(receive.min_envs, self.rows_out))
        self._effects.take_part(self.receiving)
        return None

    def end_receive(self) -> None:
        """End the pending RECEIVE, if there is one; the next RECEIVE returns its rows."""
        if self.receiving:
            self.receiving = 0
            self._effects.leave_part()

    def on_raised(self, row: int) -> Failure:
        """The answer of RECEIVE for a row that raised."""
        self.rows_out -= 1
        number = self._make.row_offset + row
        unknown = Failure("internal", "session", f"env {number} failed, and no worker said why")
        return self._infos.failures.pop(row, unknown)

    def on_done(
        self, rows: Collection[int], small: Iterable[tuple[int, bytes]], large: Iterable[int]
    ) -> tuple[tuple[int, bytes], ...]:
        """The infos of these done rows for RECEIVE: those in the arena, and those that came on the channel."""
        self.rows_out -= len(rows)
        sent = [(row, self._infos.large.pop(row)) for row in large if row in self._infos.large]
        return tuple(sorted([*small, *sent]))
