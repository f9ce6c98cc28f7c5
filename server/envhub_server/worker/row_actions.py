"""Reads the actions of one row."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence

from envhub.arena.memory import Arena
from envhub.values import actions, spaces


class RowActions:
    """The place of a row's actions in the arena, and the way of the leaves that are not there."""

    def __init__(self, arena: Arena, index: int, space: Any) -> None:
        self._arena, self._index, self._space = arena, index, space
        self._is_flat = spaces.is_flat(space)
        leaves = len(arena.layout.actions)
        self._code_words = [column.data for column in arena.action_codes]
        self._codes = [-1] * leaves
        self._readers: list[Callable[[], Any]] = [lambda: None] * leaves
        self._out_of_band: Iterator[Any] = iter(())

    def read(self, out_of_band: Sequence[Any]) -> Any:
        """The action that is posted; ``out_of_band`` has the leaves that are not in the arena."""
        self._out_of_band = iter(out_of_band)
        for number, words in enumerate(self._code_words):
            if words[self._index] != self._codes[number]:
                self._read_as(number, words[self._index])
        if self._is_flat:
            return self._readers[0]()
        return spaces.assemble(self._space, (read() for read in self._readers))

    def _read_as(self, number: int, code: int) -> None:
        """Read an action leaf by another code from now on: the driver sends another dtype than before."""
        layout = self._arena.layout
        buffer, leaf = self._arena.actions[number], layout.actions[number]
        self._codes[number] = code
        if code == actions.OUT_OF_BAND:
            self._readers[number] = lambda: next(self._out_of_band)
        else:
            self._readers[number] = actions.reader(buffer, leaf, layout.rows, self._index, code)
