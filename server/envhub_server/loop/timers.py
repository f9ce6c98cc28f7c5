"""What is due when: pure; time is the caller's."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable


class Timers:
    """One time for each key, of which the next is known without a search."""

    def __init__(self) -> None:
        self._at_s: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Hashable]] = []  # times that were replaced stay until they come up
        self._order = 0

    @property
    def next_s(self) -> float:
        """The first time of all; infinity where there is none."""
        while self._heap and self._at_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def set(self, key: Hashable, at_s: float) -> None:
        """Replace the key's time; infinity is none."""
        if at_s == self._at_s.get(key, math.inf):
            return
        if at_s == math.inf:
            del self._at_s[key]
            return
        self._at_s[key] = at_s
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, key))

    def due(self, now_s: float) -> list[Hashable]:
        """The keys whose time has come, the first one first; they have no time any more."""
        found = []
        while self.next_s <= now_s:
            key = heapq.heappop(self._heap)[2]
            del self._at_s[key]
            found.append(key)
        return found
