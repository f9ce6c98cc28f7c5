"""Functions that a loop calls at their times."""

from __future__ import annotations

import math
from collections.abc import Callable

from envhub_server.loop.clock import Clock
from envhub_server.loop.timers import Timers

WAKE_S = 1.0  # from one look at the clock to the next while something is due later; less than ``clock.STOPPED_S``

Act = Callable[[], None]


class Schedule:
    """The next time of each function, and the time at which the loop has to wake.

    It owns the timers. A bound method is the same function whenever it is named.

    Attributes:
        wake_s: when the loop wakes at the latest; infinity where no function has a time.
    """

    def __init__(self, clock: Clock) -> None:
        """Schedule by this clock."""
        self._clock, self._timers = clock, Timers[Act]()
        self.wake_s = math.inf

    def set(self, act: Act, at_s: float) -> None:
        """Replace the time at which ``act`` is called; infinity removes it."""
        self._timers.set(act, at_s)
        self.plan()

    def call_due(self, now_s: float) -> None:
        """Call each function whose time has come, in order of time; its time is removed before."""
        for act in self._timers.due(now_s):
            act()

    def plan(self) -> None:
        """Wake for the first time; earlier, while there is one, to see whether the process was stopped meanwhile."""
        next_s = self._timers.next_s
        self.wake_s = math.inf if next_s == math.inf else min(next_s, self._clock.now_s() + WAKE_S)
