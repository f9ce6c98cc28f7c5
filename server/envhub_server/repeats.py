"""Lines of the same kind, of which one is written in a while: whatever a client repeats, a log stays small. Pure."""

from __future__ import annotations

from collections.abc import Hashable

REPEAT_S = 10.0  # from one line of a kind to the next
KINDS_MAX = 1024  # that are remembered


class Repeats:
    """When the last line of each kind was written, and how many were left out since."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def left_out(self, kind: Hashable, now_s: float) -> int | None:
        """How many lines of this kind were left out before this one; None where this one is to be left out, too."""
        written_s, count = self._kinds.pop(kind, (-REPEAT_S, 0))
        if now_s - written_s < REPEAT_S:
            self._kinds[kind] = written_s, count + 1
            return None
        while len(self._kinds) >= KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = now_s, 0
        return count
