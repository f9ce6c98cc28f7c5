"""Places of a worker's rows in the arena, and the slots of their results."""

from __future__ import annotations

from typing import Sequence, Union

import numpy as np

from envhub.arena.memory import Arena

# One slot of all rows, or an array with the slot of each.
SlotOrSlots = Union[int, np.ndarray]


def as_slice(rows: Sequence[int]) -> slice:
    """The rows of a worker, each as far from the next, as a slice of a column of the arena."""
    return slice(rows[0], rows[-1] + 1, rows[1] - rows[0] if len(rows) > 1 else 1)


class Slots:
    """The arena slots for the pending results of a worker's rows.

    Usually all rows have the same slot, which one row then tells. Rows that are stepped in parts come to
    have several, and keep them in the steps of the whole batch that follow.
    """

    def __init__(self, arena: Arena, rows: slice) -> None:
        self._requests, self._words = arena.request[rows], arena.request.data
        self._first = rows.start
        self._alike = False  # whether all rows are known to have the same one

    def posted(self, whole: bool) -> SlotOrSlots:
        """The slots of rows that were just posted; ``whole`` if they are all rows, in one step of the batch."""
        if whole and self._alike:
            return int(self._words[self._first]) & 1
        slots: np.ndarray = self._requests & 1
        self._alike = whole and bool((slots == slots[0]).all())
        return int(slots[0]) if self._alike else slots
