"""The hub's time: monotonic, without the times for which the hub was stopped."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

STOPPED_S = 2.0  # later than planned by this much, the hub was stopped and not merely busy
LAG_WINDOW_S = 60.0
LAG_MIN_S = 0.0001  # the shortest lag that callers note


class Clock:
    """Seconds in which this process was not stopped.

    A hub that was stopped (SIGSTOP, a paused machine) must not find, when it wakes, that every lease and deadline has
    passed: it read no message of a client or worker meanwhile.

    Attributes:
        stopped_s: the seconds for which the process was stopped, in all.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self.stopped_s = 0.0
        self._lags: deque[tuple[float, float]] = deque()  # time and lag, each lag larger than those after it

    def now_s(self) -> float:
        """The time now."""
        return self._monotonic_s() - self.stopped_s

    def woke(self, planned_s: float) -> float:
        """The seconds for which the process was stopped in the wait that ends now and was to end by ``planned_s``."""
        late_s = self.now_s() - planned_s
        if late_s >= STOPPED_S:
            self.stopped_s += late_s
            return late_s
        if late_s >= 0:
            self.note(planned_s, late_s)
        return 0.0

    def note(self, at_s: float, lag_s: float) -> None:
        """Note a lag: until ``at_s`` the hub read no descriptor for ``lag_s``."""
        while self._lags and self._lags[-1][1] <= lag_s:
            self._lags.pop()
        self._lags.append((at_s, lag_s))

    def lag_s(self) -> float:
        """The largest lag of the last minute: the hub handled something else, or was woken later than planned."""
        while self._lags and self._lags[0][0] < self.now_s() - LAG_WINDOW_S:
            self._lags.popleft()
        return self._lags[0][1] if self._lags else 0.0
