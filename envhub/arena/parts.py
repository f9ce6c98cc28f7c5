"""Parts of a batch in an arena: some rows step while others are under way. For whoever drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envhub.arena.memory import OP_PART, STATUS_RAISED, Arena


class Parts:
    """Which rows were posted one part at a time and are not taken back yet."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._sent = np.zeros(arena.layout.rows, bool)
        self._sizes: list[int] = []

    @property
    def outstanding(self) -> int:
        """How many rows were posted and not taken."""
        return self._sent.tobytes().count(True)  # quicker than a sum of NumPy's, and asked for at each step

    def post(self, rows: np.ndarray, codes: bytes, actions: Sequence[np.ndarray]) -> None:
        """Hand these rows to their workers with their actions, one array per leaf. Ring afterwards.

        Raises:
            ValueError: one of them is under way, or others are with actions of a dtype of another size.
        """
        under_way = self._sent | (self._arena.done != self._arena.request)
        if under_way[rows].any():
            raise ValueError(f"envs {rows[under_way[rows]].tolist()} are under way; receive them first")
        sizes = [batch.dtype.itemsize for batch in actions]
        if self._sent.any() and sizes != self._sizes:  # the place of an action follows from its size
            raise ValueError("other envs are under way with actions of a dtype of another size; receive them first")
        arena = self._arena
        for buffer, batch in zip(arena.actions, actions, strict=True):
            room = buffer[: batch[:1].nbytes * arena.layout.rows].view(batch.dtype)
            room.reshape(arena.layout.rows, *batch.shape[1:])[rows] = batch
        for column, code in zip(arena.action_codes, codes, strict=True):
            column[rows] = code
        self._sizes = sizes
        arena.post_rows(OP_PART, 1 - arena.slot[rows], rows)
        self._sent[rows] = True  # not before: an interrupt in between must not pass old outcomes off as theirs

    def done(self) -> int:
        """How many of them are done."""
        return int((self._arena.done == self._arena.request)[self._sent].sum())

    def ready(self) -> tuple[np.ndarray, int | None]:
        """The rows that are done, to be ``taken``; or none, and the first that raised.

        Of several that raised each is told by itself, before any that did not.
        """
        arena = self._arena
        rows = np.flatnonzero(self._sent & (arena.done == arena.request))
        raised = rows[arena.status[rows] == STATUS_RAISED]
        return (rows[:0], int(raised[0])) if raised.size else (rows, None)

    def taken(self, rows: Any) -> None:
        """Note that these rows are outstanding no more."""
        self._sent[rows] = False

    def outcome(self, rows: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        """Copies of these rows' observations by leaf, rewards, terminations and truncations."""
        arena, slots = self._arena, self._arena.slot[rows]
        seen = [leaf[slots & 1, rows] for leaf in arena.observations]
        return seen, arena.rewards[rows], arena.terminations[rows], arena.truncations[rows]

    def infos(self, rows: np.ndarray) -> tuple[dict[int, bytes], list[int]]:
        """The encoded infos of these rows that are in the arena, and the rows whose infos are too large for it."""
        rows = rows[self._arena.info_template[rows] == 0]
        limit, lengths = self._arena.layout.info_bytes, self._arena.info_length[rows]
        pairs: list[tuple[int, Any]] = list(zip(rows.tolist(), lengths.tolist(), strict=True))
        small = {row: self._arena.infos[row, :length].tobytes() for row, length in pairs if 0 < length <= limit}
        return small, [row for row, length in pairs if length > limit]
