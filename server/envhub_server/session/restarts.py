"""When a worker that ended is started again, and when no more: pure; time is the caller's.

A worker that ended after it had served for a while is started again almost at once. One that ends again and again waits
longer each time, and one that does so too often, or cannot build its envs, is given up. The shape of this, an intensity
within a window, is Erlang/OTP's; the growing delay is supervisord's.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """How often and how soon.

    Attributes:
        restarts_max: so many ends of one worker within the window are followed by a restart; the next one is the last.
        window_s: how long an end counts.
        delay_s: before the first restart in a row; each further one waits twice as long.
        delay_max_s: but never longer than that.
        jitter: each delay is longer or shorter by up to this part of it, lest all workers start at the same time.
        stable_s: who served for so long begins a new row.
        boots_max: so many times in a row a worker may fail to build its envs.
        all_max: so many restarts of all workers of a session within the window.
    """

    restarts_max: int = 5
    window_s: float = 60.0
    delay_s: float = 0.1
    delay_max_s: float = 10.0
    jitter: float = 0.2
    stable_s: float = 1.0
    boots_max: int = 3
    all_max: int = 10


class Restarts:
    """The exits of the workers of one session."""

    def __init__(self, policy: RestartPolicy, random_: random.Random) -> None:
        """Judge by ``policy``; the jitter is drawn from ``random_``."""
        self.policy = policy
        self._random = random_
        self._ends_s: dict[int, deque[float]] = {}
        self._all_s: deque[float] = deque()
        self._row: dict[int, int] = {}  # restarts in a row
        self._boots: dict[int, int] = {}
        self._serving_since_s: dict[int, float] = {}
        self._count: dict[int, int] = {}

    def count(self, worker: int) -> int:
        """How often this worker has ended."""
        return self._count.get(worker, 0)

    def serves(self, worker: int, now_s: float) -> None:
        """Its envs stand."""
        self._serving_since_s[worker] = now_s
        self._boots.pop(worker, None)

    def ended(self, worker: int, now_s: float) -> float | None:
        """After how many seconds to start it again; None where its budget is spent."""
        policy = self.policy
        self._count[worker] = self.count(worker) + 1
        since_s = self._serving_since_s.pop(worker, None)
        if since_s is None:
            self._boots[worker] = self._boots.get(worker, 0) + 1
            if self._boots[worker] >= policy.boots_max:
                return None
        elif now_s - since_s >= policy.stable_s:
            self._row.pop(worker, None)
        if self._spent(self._ends_s.setdefault(worker, deque()), policy.restarts_max, now_s):
            return None
        if self._spent(self._all_s, max(policy.all_max, policy.restarts_max), now_s):
            return None
        row = self._row.get(worker, 0)
        self._row[worker] = row + 1
        delay_s = min(policy.delay_max_s, policy.delay_s * 2.0 ** min(row, 64))
        return delay_s * (1 + self._random.uniform(-policy.jitter, policy.jitter))

    def faulted(self, worker: int, now_s: float) -> bool:
        """Note that a serving worker had to make an env anew; whether its budget allows that."""
        self._count[worker] = self.count(worker) + 1
        spent = self._spent(self._ends_s.setdefault(worker, deque()), self.policy.restarts_max, now_s)
        return not spent and not self._spent(self._all_s, max(self.policy.all_max, self.policy.restarts_max), now_s)

    def _spent(self, ends_s: deque[float], limit: int, now_s: float) -> bool:
        while ends_s and ends_s[0] <= now_s - self.policy.window_s:
            ends_s.popleft()
        ends_s.append(now_s)
        return len(ends_s) > limit
