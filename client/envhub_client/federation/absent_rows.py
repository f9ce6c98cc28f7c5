"""State of the rows whose hub was lost, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Step = tuple[np.ndarray, bytes, list[np.ndarray]]  # of some rows: their numbers, codes and actions


class AbsentRows:
    """Results that each row has returned since its hub was lost, and those that it is to return.

    Attributes:
        earlier: last observations on the lost hub, an array for each leaf.
        untold: mask of the rows whose truncation was not returned yet.
        unseen: mask of the rows that have returned no observation of the hub that has them again.
        due: mask of the rows that were sent and return a truncation.
        waiting: steps of rows that were sent, which begin once these are on a hub again.
        shown: mask of the outstanding rows whose results have an observation of that hub.
        reported: mask of the rows whose truncation the step of all rows under way has returned first.
    """

    def __init__(self, earlier: Sequence[np.ndarray], sent: np.ndarray) -> None:
        """Rows with these last observations, all of which are to be truncated; a mask says which were sent."""
        count = len(sent)
        self.earlier = earlier
        self.untold = np.ones(count, bool)
        self.unseen = np.ones(count, bool)
        self.due: np.ndarray = sent.copy()
        self.waiting: list[Step] = []
        self.shown = np.zeros(count, bool)
        self.reported = np.zeros(count, bool)

    def of(self, rows: range) -> AbsentRows:
        """The state of these rows, numbered from 0."""
        own = slice(rows.start, rows.stop)
        part = AbsentRows([leaf[own] for leaf in self.earlier], self.due[own])
        part.untold, part.unseen = self.untold[own].copy(), self.unseen[own].copy()
        for env_ids, codes, arrays in self.waiting:
            places = np.flatnonzero((rows.start <= env_ids) & (env_ids < rows.stop))
            if places.size:
                part.waiting.append((env_ids[places] - rows.start, codes, [array[places] for array in arrays]))
        return part

    @property
    def are_waiting(self) -> np.ndarray:
        """Mask of the rows whose steps begin once they are on a hub again."""
        mask = np.zeros(len(self.due), bool)
        for env_ids, *_ in self.waiting:
            mask[env_ids] = True
        return mask

    @property
    def are_settled(self) -> bool:
        """True if every row was truncated and has an observation on its hub, and none waits for either."""
        return not (self.waiting or (self.untold | self.unseen | self.due).any())

    def send(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Send these rows: each is truncated, or if it was already, waits for a hub. The same again replaces it."""
        self.forget(env_ids)
        untold = self.untold[env_ids]
        self.due[env_ids[untold]] = True
        if not untold.all():
            self.waiting.append((env_ids[~untold], codes, [array[~untold] for array in arrays]))

    def truncate_waiting(self) -> None:
        """Have the rows truncated that wait for a hub."""
        waiting = self.are_waiting
        self.untold |= waiting
        self.due |= waiting
        self.waiting = []

    def show_earlier(self, observations: Sequence[np.ndarray], rows: np.ndarray) -> None:
        """Put the last observations on the lost hub of the rows of this mask into those of all rows."""
        for array, leaf in zip(observations, self.earlier, strict=True):
            array[rows] = leaf[rows]

    def note_told(self, rows: np.ndarray) -> None:
        """Note that the truncations of these rows, of those that have one, were returned."""
        self.untold[rows] = False
        self.forget(rows)

    def forget(self, rows: np.ndarray) -> None:
        """Forget that these rows were sent."""
        self.due[rows] = False
        self.waiting = [each for each in self.waiting if not np.isin(each[0], rows).any()]
