"""The parts of no fixed size of each row's last observation, for the results that the hub stores in an env's place.

The arena has two slots for the parts of fixed size, so the last complete observation survives an env that fails in the
middle of the next. Parts of no fixed size have one place in the arena, beside the info. The hub therefore keeps a copy
whenever rows are done and nobody may have seen them: the step failed, or another client attaches. The row's ``done``
word says which observation a copy is of, so a copy of another one is never taken for the last.
"""

from __future__ import annotations

from collections.abc import Iterable

from envhub.arena.memory import Arena
from envhub.values import codec


class LooseParts:
    """Copies of what rows left beside the arrays, by the ``done`` word that they had then."""

    def __init__(self) -> None:
        self._large: dict[int, tuple[int, bytes]] = {}  # what was sent instead, too large for the arena
        self._kept: dict[int, tuple[int, bytes]] = {}

    def note_large(self, row: int, number: int, blob: bytes) -> None:
        """Know what a row leaves with the ``done`` word ``number``, which is too large for the arena."""
        self._large[row] = (number, blob)

    def keep(self, arena: Arena, rows: Iterable[int]) -> None:
        """Copy what those of these rows have left that are done."""
        for row in rows:
            number, length = int(arena.done[row]), int(arena.info_length[row])
            if number != arena.request[row]:
                continue
            if 0 < length <= arena.layout.info_bytes:
                self._kept[row] = (number, arena.infos[row, :length].tobytes())
            else:
                self._kept[row] = self._large.get(row, (-1, b""))

    def of(self, arena: Arena, row: int) -> bytes:
        """The parts of the row's last complete observation; nothing where they are those that its client has."""
        number, blob = self._kept.get(row, (-1, b""))
        if number != arena.done[row]:
            return b""
        try:
            found = codec.decode(blob)
        except codec.DecodeError:  # a client may write to the arena
            return b""
        whole = isinstance(found, list) and len(found) == 2 and isinstance(found[0], bytes)
        return found[0] if whole else b""
