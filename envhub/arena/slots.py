"""The two slots of each row's observation: the next outcome goes where the last one is not. For whoever drives."""

from __future__ import annotations

import numpy as np

from envhub.arena.layout import SLOTS
from envhub.arena.memory import Arena


class Slots:
    """Which slot the next step of the whole batch goes to.

    Mostly every row used the same one, and the batch is a view. Rows that went by parts may differ.

    Attributes:
        mixed: whether they differ.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._rows = np.arange(arena.layout.rows)
        self._views = [[leaf[slot] for leaf in arena.observations] for slot in range(SLOTS)]
        self._slot = 0
        self.mixed = False

    def take_over(self) -> None:
        """Go on from where another driver, or a part of the batch, has left the rows."""
        self._slot = self._arena.take_over()
        self.mixed = bool((self._arena.slot != self._slot).any())

    def post(self, op: int) -> None:
        """Hand all rows to their workers; actions must stand already. Ring afterwards."""
        if self.mixed:
            self._arena.post_rows(op, 1 - (self._arena.slot & 1), self._rows)
        else:
            self._slot = 1 - self._slot
            self._arena.post(op, self._slot)

    def observations(self) -> list[np.ndarray]:
        """Those of the whole batch: views of memory that is written at the next post but one, or, if mixed, copies."""
        if self.mixed:
            slots = self._arena.slot & 1
            return [leaf[slots, self._rows] for leaf in self._arena.observations]
        return self._views[self._slot]
