"""Reads the actions of the rows of a vector env."""

from __future__ import annotations

from typing import Any

import numpy as np

from envhub.arena.memory import Arena
from envhub.values import actions, spaces


class BatchActions:
    """The place of the rows' actions in the arena."""

    def __init__(self, arena: Arena, place: slice, space: Any) -> None:
        self._arena, self._place, self._space = arena, place, space
        self._code_columns = [column[place] for column in arena.action_codes]
        self._codes = b""
        self._actions: list[np.ndarray] = []  # views of each leaf, by these codes

    def read(self) -> Any:
        """Copies of the posted actions.

        Raises:
            TypeError: the rows have actions of several dtypes, or actions out of band.
        """
        codes = b"".join([column.tobytes() for column in self._code_columns])
        if codes != self._codes:
            self._read_as(codes)
        # The env may keep its actions, so it gets copies.
        return spaces.assemble(self._space, (batch.copy() for batch in self._actions))

    def _read_as(self, codes: bytes) -> None:
        """Read the actions by the rows' codes from now on; ``codes`` has the bytes of the codes.

        Raises:
            TypeError: the rows have actions of several dtypes, or actions out of band.
        """
        self._codes = b""
        each = [set(column.tolist()) for column in self._code_columns]
        if any(len(kinds) > 1 or actions.OUT_OF_BAND in kinds for kinds in each):
            raise TypeError("a vector env takes the actions of all its envs as arrays of one dtype")
        layout = self._arena.layout
        self._actions = []
        for buffer, leaf, (code,) in zip(self._arena.actions, layout.actions, each):
            self._actions.append(actions.batch_of(buffer, leaf, layout.rows, code)[self._place])
        self._codes = codes
