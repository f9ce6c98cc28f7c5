"""The frames of a reply that brings the outcome of a reset or step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envhub import messages
from envhub.arena import Arena
from envhub.columns import Rows, pack_columns
from envhub.parts import Parts
from envhub.slots import Slots

Sendable = Callable[[list[np.ndarray]], list[Any]]


class ReplyFrames:
    """One reply's frames: arrays, then what is said by row, then what is said in columns.

    Attributes:
        rows: row and blob of each that has one.
    """

    def __init__(self, arena: Arena, slots: Slots, sendable: Sendable) -> None:
        """From this memory; ``sendable`` makes frames of observations."""
        self.rows: list[tuple[int, Any]] = []
        self._arena = arena
        self._slots = slots
        self._sendable = sendable
        self._arrays: list[Any] = []
        self._columns: list[Rows] = []

    def batch(self, results: bool, infos: dict[int, bytes] | None) -> None:
        """The whole batch, with its results; and infos, if there are any, of which these do not stand in the arena."""
        self._arrays += self._sendable(self._slots.observations())
        if results:
            self._arrays.append(self._arena.results.tobytes())
        if infos is not None:
            self.rows = sorted([*self._arena.small_infos(), *infos.items()], key=lambda pair: pair[0])
            self._columns = self._arena.columns()

    def part(self, parts: Parts, rows: np.ndarray) -> None:
        """These rows, with their results."""
        self._columns = self._arena.columns(rows)
        seen, rewards, terminations, truncations = parts.outcome(rows)
        results = rewards.tobytes() + terminations.tobytes() + truncations.tobytes()
        self._arrays += [rows.tobytes(), *self._sendable([np.ascontiguousarray(leaf) for leaf in seen]), results]

    def frames(self) -> list[Any]:
        """All of them."""
        found = list(self._arrays)
        if self.rows or self._columns:
            found.append(messages.pack_rows(self.rows))
        if self._columns:
            found.append(pack_columns(self._columns))
        return found
