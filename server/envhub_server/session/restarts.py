"""Times at which an ended worker is started again, and the end of restarts. Pure; time is the caller's.

A worker that ended after it had served for a while is started again almost at once. One that ends again and again waits
longer each time, and one that does so too often, or cannot build its envs, is given up. The shape of this, an intensity
within a window, is Erlang/OTP's; the growing delay is supervisord's.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

WINDOW_S = 60.0  # for how long an end counts
DELAY_S = 0.1  # before the first restart in a row; each further one waits twice as long
DELAY_MAX_S = 10.0  # but never longer than that
JITTER = 0.2  # each delay is longer or shorter by up to this part of it, lest all workers start at the same time
STABLE_S = 1.0  # a worker that has served for so long begins a new row of restarts
BOOTS_MAX = 3  # so many times in a row a worker may fail to build its envs
ALL_MAX = 10  # restarts of all workers of a session within the window, where it has fewer envs


class Restarts:
    """The exits of the workers of one session.

    So many ends of one worker within the window as ``restarts_max`` says are followed by a restart; the next one is the
    last. The ends of all workers have such a limit, too: one for each env, but no less than that of one worker.
    """

    def __init__(self, restarts_max: int, num_envs: int, random_: random.Random) -> None:
        """Judge the workers of so many envs; the jitter is drawn from ``random_``."""
        self._restarts_max = restarts_max
        self._all_max = max(ALL_MAX, num_envs, restarts_max)
        self._random = random_
        self._ends_s: defaultdict[int, deque[float]] = defaultdict(deque)
        self._all_s: deque[float] = deque()
        self._row: Counter[int] = Counter()  # restarts in a row
        self._boots: Counter[int] = Counter()
        self._serving_since_s: dict[int, float] = {}
        self._count: Counter[int] = Counter()

    def count(self, worker: int) -> int:
        """Number of times that this worker has ended."""
        return self._count[worker]

    def told(self, worker: int) -> str:
        """Number of failures of the worker or its env; and of all workers, where that number was too high."""
        text = f"it failed {self._count[worker]} times"
        if len(self._ends_s[worker]) > self._restarts_max or len(self._all_s) <= self._all_max:
            return text
        return f"{text}, and all workers of this session {len(self._all_s)} times within {WINDOW_S:g} s,"

    def serves(self, worker: int, now_s: float) -> None:
        """Note that its envs are made."""
        self._serving_since_s[worker] = now_s
        self._boots.pop(worker, None)

    def ended(self, worker: int, now_s: float) -> float | None:
        """After how many seconds to start it again; None where its budget is spent."""
        self._count[worker] += 1
        since_s = self._serving_since_s.pop(worker, None)
        if since_s is None:
            self._boots[worker] += 1
            if self._boots[worker] >= BOOTS_MAX:
                return None
        elif now_s - since_s >= STABLE_S:
            self._row.pop(worker, None)
        if self._is_spent(worker, now_s):
            return None
        delay_s = min(DELAY_MAX_S, DELAY_S * 2.0 ** min(self._row[worker], 64))
        self._row[worker] += 1
        return delay_s * (1 + self._random.uniform(-JITTER, JITTER))

    def faulted(self, worker: int, now_s: float) -> bool:
        """Note that a serving worker had to make an env again; whether its budget allows that."""
        self._count[worker] += 1
        return not self._is_spent(worker, now_s)

    def _is_spent(self, worker: int, now_s: float) -> bool:
        own_s, all_s = self._ends_s[worker], self._all_s
        return _spent(own_s, self._restarts_max, now_s) or _spent(all_s, self._all_max, now_s)


def _spent(ends_s: deque[float], limit: int, now_s: float) -> bool:
    while ends_s and ends_s[0] <= now_s - WINDOW_S:
        ends_s.popleft()
    ends_s.append(now_s)
    return len(ends_s) > limit
