"""The attributes that were set on envs, for the envs that replace them."""

from __future__ import annotations

from typing import Sequence

from envhub_server.ipc.control import SetAttrRows

BYTES_MAX = 1 << 24  # of all values of a session, each counted once per env
ENTRY_BYTES = 128  # what the entry of one env takes besides its value


class SetAttributes:
    """The last values by name and row, in the order in which the names were set."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, bytes]] = {}
        self._nbytes = 0

    def note(self, message: SetAttrRows) -> bool:
        """Keep a set attribute; return False if there is no room, and then keep nothing of this name."""
        values = self._values.pop(message.name, {})
        self._nbytes -= _nbytes(values)
        values.update(zip(message.rows, message.each or [message.value] * len(message.rows)))
        if self._nbytes + _nbytes(values) > BYTES_MAX:
            return False
        self._nbytes += _nbytes(values)
        self._values[message.name] = values
        return True

    def again(self, rows: Sequence[int]) -> list[SetAttrRows]:
        """Messages that set it all again on the new envs of these rows; such a message has no number, and no answer."""
        by_name = ((name, [row for row in rows if row in values], values) for name, values in self._values.items())
        return [SetAttrRows(mine, name, each=[values[row] for row in mine]) for name, mine, values in by_name if mine]


def _nbytes(values: dict[int, bytes]) -> int:
    return sum(map(len, values.values())) + ENTRY_BYTES * len(values)
