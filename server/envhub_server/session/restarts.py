"""The restarts of slots whose processes end: their delays and their limit. Pure; the caller passes the time in.

A slot whose process served for a while gets the next one almost at once. The delay grows with each restart in a row. A
slot whose processes end too often, or cannot build its envs, gets no other. The limit within a window follows
Erlang/OTP's restart intensity; the growing delay follows supervisord.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

WINDOW_S = 60.0  # an end counts for this long
DELAY_S = 0.1  # before the first restart in a row; it doubles with each further one
DELAY_MAX_S = 10.0  # upper limit of the delay
JITTER = 0.2  # each delay varies by up to this fraction, so that workers do not all start at the same time
STABLE_S = 1.0  # a process that has served for this long starts a new row of restarts
BOOTS_MAX = 3  # consecutive failures of a slot's processes to build its envs
ALL_MAX = 10  # least limit of restarts of all slots of a session within the window


class Restarts:
    """The ends of the processes of one session, by slot.

    ``restarts_max`` ends in a slot within the window are each followed by a restart; the next end is final. The ends in
    all slots together have a limit too: one per env, but no less than the limit of one slot.
    """

    def __init__(self, restarts_max: int, num_envs: int, random_: random.Random) -> None:
        """Count the ends of the processes of ``num_envs`` envs; the jitter is drawn from ``random_``."""
        self._restarts_max = restarts_max
        self._all_max = max(ALL_MAX, num_envs, restarts_max)
        self._random = random_
        self._ends_s: defaultdict[int, deque[float]] = defaultdict(deque)
        self._all_s: deque[float] = deque()
        self._row: Counter[int] = Counter()  # restarts in a row
        self._boots: Counter[int] = Counter()
        self._serving_since_s: dict[int, float] = {}
        self._count: Counter[int] = Counter()

    def count(self, slot: int) -> int:
        """Number of ends and rebuilt envs in this slot."""
        return self._count[slot]

    def count_text(self, slot: int) -> str:
        """The number of failures in the slot, and in all slots if that number was too high, as text for users."""
        text = f"it failed {self._count[slot]} times"
        if len(self._ends_s[slot]) > self._restarts_max or len(self._all_s) <= self._all_max:
            return text
        return f"{text}, and all workers of this session {len(self._all_s)} times within {WINDOW_S:g} s,"

    def serves(self, slot: int, now_s: float) -> None:
        """Note that the envs of the slot are made."""
        self._serving_since_s[slot] = now_s
        self._boots.pop(slot, None)

    def ended(self, slot: int, now_s: float, started: bool = True) -> float | None:
        """Note an end; return the seconds until the restart, or None if the budget is spent.

        A process that was not ``started``, for want of descriptors for example, says nothing about the envs, and takes
        nothing of the budget.
        """
        self._count[slot] += 1
        since_s = self._serving_since_s.pop(slot, None)
        if not started:
            return self._next_delay_s(slot)
        if since_s is None:
            self._boots[slot] += 1
            if self._boots[slot] >= BOOTS_MAX:
                return None
        elif now_s - since_s >= STABLE_S:
            self._row.pop(slot, None)
        if self._is_spent(slot, now_s):
            return None
        return self._next_delay_s(slot)

    def _next_delay_s(self, slot: int) -> float:
        delay_s = min(DELAY_MAX_S, DELAY_S * 2.0 ** min(self._row[slot], 64))
        self._row[slot] += 1
        return delay_s * (1 + self._random.uniform(-JITTER, JITTER))

    def faulted(self, slot: int, now_s: float) -> bool:
        """Note that a serving process rebuilt an env; return True if the budget of its slot allows that."""
        self._count[slot] += 1
        return not self._is_spent(slot, now_s)

    def _is_spent(self, slot: int, now_s: float) -> bool:
        own_s, all_s = self._ends_s[slot], self._all_s
        return _spent(own_s, self._restarts_max, now_s) or _spent(all_s, self._all_max, now_s)


def _spent(ends_s: deque[float], limit: int, now_s: float) -> bool:
    while ends_s and ends_s[0] <= now_s - WINDOW_S:
        ends_s.popleft()
    ends_s.append(now_s)
    return len(ends_s) > limit
