"""Timers in one heap. Pure: the caller passes the time."""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Timers(Generic[Key]):
    """One time for each key, which is hashable; the first time is found without a search."""

    def __init__(self) -> None:
        self._at_s: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []  # also has times that were replaced, until they come up
        self._order = 0

    @property
    def next_s(self) -> float:
        """The first time of all; infinity where there is none."""
        while self._heap and self._at_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def set(self, key: Key, at_s: float) -> None:
        """Replace the key's time; infinity removes it."""
        if at_s == self._at_s.get(key, math.inf):
            return
        if at_s == math.inf:
            del self._at_s[key]
            return
        self._at_s[key] = at_s
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, key))

    def due(self, now_s: float) -> list[Key]:
        """The keys whose time has come, in order of time; removes their times."""
        keys = []
        while self.next_s <= now_s:
            key = heapq.heappop(self._heap)[2]
            del self._at_s[key]
            keys.append(key)
        return keys
