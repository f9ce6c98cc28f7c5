"""Times of a worker's steps, measured in a sample of the batches."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from envhub_server.ipc.channel import moved_up
from envhub_server.ipc.control import StepTimes

with contextlib.suppress(ImportError):  # Windows has none
    import resource

BATCHES_LEFT_OUT = 2  # the first batches, which load and compile much
EACH_UNTIL = 64  # the number of first batches that are all timed; after them one in ONE_IN
ONE_IN = 16
FIRST_REPORT = 8  # the number of timed batches before the first report; four times as many before each next one


class StepTimer:
    """Clocks around a batch of steps.

    Time in which the process was ready but had no CPU counts neither as CPU time nor as waiting. The kernel says how
    long that was (``schedstat``). Where it does not, a batch without a voluntary context switch counts as one without
    waiting; other systems than Linux do not say either, and no batch counts as one with waiting.
    """

    def __init__(self) -> None:
        self.batches_left = BATCHES_LEFT_OUT + 1  # up to the next timed one, including it
        self._batches = 0
        self._report_at = FIRST_REPORT
        self._steps = self._cpu_ns = self._wait_ns = 0
        self._reported = False  # whether these sums are reported; then the next batch starts new ones
        self._start: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
        self._schedstat = -1
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):
            self._schedstat = moved_up(os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Free the descriptor."""
        if self._schedstat >= 0:
            os.close(self._schedstat)

    def start(self) -> None:
        """Note the start of a timed batch."""
        switches, queued_ns = _voluntary_switches(), self._queued_ns()
        wall_ns, own_cpu_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()
        # The clocks that count are read last here and first in ``stop``, so that reading the others does not count.
        self._start = switches, queued_ns, wall_ns, own_cpu_ns, cpu_ns

    def stop(self, steps: int) -> bool:
        """Note the end of a timed batch of ``steps`` envs; return True if ``times`` must be reported."""
        cpu_ns, own_cpu_ns, wall_ns = time.process_time_ns(), time.thread_time_ns(), time.perf_counter_ns()
        end = _voluntary_switches(), self._queued_ns(), wall_ns, own_cpu_ns, cpu_ns
        switches, queued_ns, wall_ns, own_cpu_ns, cpu_ns = (after - before for before, after in zip(self._start, end))
        if self._reported:  # start new sums, because the first batches of a process are slower
            self._steps = self._cpu_ns = self._wait_ns = 0
        self._batches += 1
        self.batches_left = 1 if self._batches < EACH_UNTIL else ONE_IN
        self._steps += steps
        self._cpu_ns += cpu_ns
        if switches:  # while other threads of the env compute, the env does not wait
            self._wait_ns += max(0, wall_ns - max(own_cpu_ns, cpu_ns) - queued_ns)
        self._reported = self._batches >= self._report_at
        if self._reported:
            self._report_at *= 4
        return self._reported

    @property
    def times(self) -> StepTimes:
        """The sums since the last report; the report itself, when ``stop`` has just returned True."""
        return StepTimes(self._steps, self._cpu_ns, self._wait_ns)

    def _queued_ns(self) -> int:
        if sys.platform != "linux" or self._schedstat < 0:
            return 0
        try:
            return int(os.pread(self._schedstat, 64, 0).split()[1])
        except (OSError, ValueError, IndexError):  # an env has closed it, or opened something else in its place
            self._schedstat = -1
            return 0


def _voluntary_switches() -> int:
    """Number of times that this thread has given up the CPU to wait."""
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
