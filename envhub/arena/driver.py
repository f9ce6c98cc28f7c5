"""Driving an arena: writing actions, handing rows to their workers, and reading what they stored.

The hub drives, or on the shared lane its client. Usually all rows step together, so that their results are in the same
slot, and the batch is a view of it. Rows may also be stepped in partial batches; their slots may differ from then on.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from envhub.arena.layout import SLOTS
from envhub.arena.memory import OP_PART, STATUS_RAISED, Arena
from envhub.values.actions import OUT_OF_BAND


class ArenaDriver:
    """One process's side of driving an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._rows = np.arange(arena.layout.rows)
        self._done = arena.done.data
        self._views = [[leaf[slot] for leaf in arena.observations] for slot in range(SLOTS)]
        self._knows_slots = False  # whether ``mixed`` is up to date with the arena's words
        self.mixed = False  # whether the rows' last results are not all in the same slot
        self._codes = b""  # the codes of the actions in the arena; empty if unknown
        self._buffers: list[np.ndarray] = []  # buffers of the leaves that have an array by these codes
        self.sent = bytearray(arena.layout.rows)  # 1 if ``post_rows`` posted the row and its result was not taken
        self._sent = np.frombuffer(self.sent, np.bool_)
        self._item_sizes: list[int] = []  # item sizes of the actions of the sent rows

    def forget(self) -> None:
        """Have the next post read the arena's words, because another driver may have written them."""
        self._codes, self._knows_slots = b"", False

    def take_over(self) -> None:
        """Begin to drive after another driver; forget the rows that were sent in partial batches."""
        self.forget()
        self._sent[:] = False

    # --- all rows ---------------------------------------------------------------------------------------------------

    def post(self, op: int, codes: bytes = b"", actions: Sequence[Any] = ()) -> None:
        """Hand all rows to their workers for ``op``; no row may be pending. Ring afterwards.

        A step has a code per action leaf, see ``envhub.values.actions``, and one contiguous array, or its bytes, of all
        rows per leaf that has an array by its code.
        """
        arena = self._arena
        if codes and codes != self._codes:
            self._codes = b""  # until all actions are written: an interrupt may come in between
            for column, code in zip(arena.action_codes, codes):
                column[:] = code
            self._buffers = [buffer for buffer, code in zip(arena.actions, codes) if code != OUT_OF_BAND]
            self._codes = codes
        for buffer, batch in zip(self._buffers, actions):
            batch_bytes = np.frombuffer(batch, np.uint8)
            buffer[: batch_bytes.size] = batch_bytes
        if not self._knows_slots:
            self.mixed = arena.take_over()
        self._knows_slots = False  # until all words are written
        if self.mixed:
            arena.post_rows(op, self._rows)
        else:
            arena.post(op)
        self._knows_slots = True

    def observations(self) -> list[np.ndarray]:
        """The last observations by leaf: views until the next post but one, or copies if the slots are ``mixed``."""
        if self.mixed:
            slots = self._arena.done & 1
            return [leaf[slots, self._rows] for leaf in self._arena.observations]
        return self._views[self._done[0] & 1]

    # --- some rows --------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        return self.sent.count(1)

    def post_rows(self, rows: np.ndarray, codes: bytes, actions: Sequence[np.ndarray]) -> None:
        """Hand these rows to their workers with an array of actions per leaf; raises ``ValueError``."""
        arena = self._arena
        under_way = self._sent | (arena.done != arena.request)
        if under_way[rows].any():
            raise ValueError(f"envs {rows[under_way[rows]].tolist()} are under way; receive them first")
        item_sizes = [batch.dtype.itemsize for batch in actions]
        if self._sent.any() and item_sizes != self._item_sizes:  # the offset of an action depends on its size
            raise ValueError("other envs are under way with actions of a dtype of another size; receive them first")
        self.forget()
        for buffer, batch in zip(arena.actions, actions):
            room = buffer[: batch[:1].nbytes * arena.layout.rows].view(batch.dtype)
            room.reshape(arena.layout.rows, *batch.shape[1:])[rows] = batch
        for column, code in zip(arena.action_codes, codes):
            column[rows] = code
        self._item_sizes = item_sizes
        arena.post_rows(OP_PART, rows)
        self.note_sent(rows)  # last, so that after an interrupt old results do not count as new ones

    def note_sent(self, rows: np.ndarray) -> None:
        self._sent[rows] = True

    def done(self) -> int:
        return int((self._arena.done == self._arena.request)[self._sent].sum())

    def ready(self) -> tuple[np.ndarray, int | None]:
        """The sent rows that are done, ascending, and None; or no rows, and the first done row that raised.

        Rows that raised are reported first, one per call. Rows are reported until they are ``taken``.
        """
        arena = self._arena
        rows = np.flatnonzero(self._sent & (arena.done == arena.request))
        raised = rows[arena.status[rows] == STATUS_RAISED]
        return (rows[:0], int(raised[0])) if raised.size else (rows, None)

    def taken(self, rows: Any) -> None:
        self._sent[rows] = False

    def results(self, rows: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        arena, slots = self._arena, self._arena.done[rows] & 1
        observations = [leaf[slots, rows] for leaf in arena.observations]
        return observations, arena.rewards[rows], arena.terminations[rows], arena.truncations[rows]

    def infos(self, rows: np.ndarray) -> tuple[dict[int, bytes], list[int]]:
        """The encoded infos of these rows, and the rows whose infos are too large for the arena."""
        arena = self._arena
        rows = rows[arena.info_template[rows] <= 0]
        blobs = [(row, arena.info(row)) for row in rows.tolist()]
        small = {row: bytes(blob) for row, blob in blobs if blob is not None}
        lengths = arena.info_length
        return small, [row for row, blob in blobs if blob is None and lengths[row] > arena.layout.info_bytes]
