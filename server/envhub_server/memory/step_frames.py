"""The frames of a STEP, checked against the arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envhub.arena.memory import Arena
from envhub.protocol import messages
from envhub.values import actions, codec


class StepFrames:
    """What a client sends with its steps.

    Mostly every step's actions are of the same kind, so what follows from it is worked out when it changes.

    Attributes:
        codes, arrays: of the last step, as ``ArenaDriver.post`` takes them.
        has_beside: whether parts of the actions of the last step travel beside the arrays.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._sized_codes: bytes | None = None
        self._sizes: list[int] = []
        self.codes = b""
        self.arrays: Sequence[Any] = ()
        self.has_beside = False
        self._beside: list[tuple[int, bytes]] = []

    def load(self, codes: bytes, frames: Sequence[Any]) -> str:
        """Take the frames of a step; what is wrong with them, if they do not fit the arena."""
        if codes != self._sized_codes and (problem := self._size(codes)):
            return f"{problem}; no env has moved"
        found = [*map(len, frames)]
        if found[: len(self._sizes)] != self._sizes or len(found) != len(self._sizes) + self.has_beside:
            return f"action frames of {found} bytes where {self._sizes} are due; no env has moved"
        if self.has_beside and (problem := self._beside_problem(frames[-1])):
            return problem
        self.codes, self.arrays = codes, frames  # what is beside comes last, and goes into no buffer
        return ""

    def _size(self, codes: bytes) -> str:
        """Know how large the arrays are; what is wrong with these codes."""
        layout = self._arena.layout
        if len(codes) != len(layout.actions):
            return f"{len(codes)} codes for {len(layout.actions)} action leaves"
        try:
            sizes = actions.sizes(codes, layout.actions, layout.rows)
        except ValueError as error:
            return str(error)
        self._sized_codes, self._sizes, self.has_beside = codes, sizes, actions.BESIDE in codes
        return ""

    def _beside_problem(self, frame: Any) -> str:
        rows = self._arena.layout.rows
        try:
            self._beside = messages.unpack_rows(frame, rows)
        except codec.DecodeError as error:
            return f"{error}; no env has moved"
        complete = [row for row, _ in self._beside] == list(range(rows))
        return "" if complete else "the actions beside the arrays are not one for each row; no env has moved"

    def part(self, rows: Sequence[int], codes: bytes, frames: Sequence[Any]) -> tuple[np.ndarray, list[np.ndarray]]:
        """The rows of a part of the batch, and their actions, one array per leaf.

        Raises:
            ValueError: they do not fit the arena.
        """
        layout = self._arena.layout
        wanted = {row for row in rows if 0 <= row < layout.rows}
        if not wanted or len(wanted) < len(rows):
            raise ValueError(f"the rows are not different ones of {layout.rows}")
        sizes = actions.sizes(codes, layout.actions, len(rows))
        if len(sizes) != len(layout.actions) or [len(frame) for frame in frames] != sizes:
            raise ValueError(f"action frames of other than {sizes} bytes")
        dtypes = [actions.DTYPES[code & ~actions.PYTHON] for code in codes]
        arrays = [
            np.frombuffer(frame, dtype).reshape(len(rows), *leaf.shape)
            for frame, dtype, leaf in zip(frames, dtypes, layout.actions, strict=True)
        ]
        return np.array(rows, np.int64), arrays

    def beside(self, rows: Sequence[int]) -> bytes:
        """What travels beside the arrays, of these rows."""
        return messages.pack_rows(self._beside[row] for row in rows)
