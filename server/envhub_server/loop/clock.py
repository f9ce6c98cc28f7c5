"""The hub's time: monotonic, and standing still while the hub itself does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

STOPPED_S = 2.0  # woken so much later than planned, the hub was stopped and not merely busy
LAG_WINDOW_S = 60.0
LAG_MIN_S = 0.0001  # of what takes less, no note need be made


class Clock:
    """Seconds that this process could have used.

    A hub that was suspended (SIGSTOP, a paused machine) must not find, when it wakes, that every lease and every
    deadline has passed meanwhile: those whom it would judge had no chance to be heard.

    Attributes:
        stopped_s: for how long it was stopped, in all.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Of this clock, without the times in which the process was stopped."""
        self._monotonic_s = monotonic_s
        self.stopped_s = 0.0
        self._lags: deque[tuple[float, float]] = deque()  # when, and how late, each later than those that follow it

    def now_s(self) -> float:
        """The time."""
        return self._monotonic_s() - self.stopped_s

    def woke(self, planned_s: float) -> float:
        """Know that a wait is over that was to end by ``planned_s``; for how long the process was stopped."""
        late_s = self.now_s() - planned_s
        if late_s >= STOPPED_S:
            self.stopped_s += late_s
            return late_s
        if late_s >= 0:
            self.note(planned_s, late_s)
        return 0.0

    def note(self, at_s: float, lag_s: float) -> None:
        """Know that, until then, for so long nobody looked at what had come."""
        while self._lags and self._lags[-1][1] <= lag_s:
            self._lags.pop()
        self._lags.append((at_s, lag_s))

    def lag_s(self) -> float:
        """For how long the hub, within the last minute, at most did not look at what had come.

        It was handling something else, or was woken later than planned.
        """
        while self._lags and self._lags[0][0] < self.now_s() - LAG_WINDOW_S:
            self._lags.popleft()
        return self._lags[0][1] if self._lags else 0.0
