"""How long the steps of a worker's envs take: timed in a sample of the batches that are asked for anyway."""

from __future__ import annotations

import os
import resource
import time

from envhub_server.ipc.channel import moved_up
from envhub_server.ipc.control import StepTimes

BATCHES_LEFT_OUT = 2  # the first ones, in which much is loaded and compiled
EACH_UNTIL = 64  # batches are all timed until so many were, and after that one in ONE_IN
ONE_IN = 16
FIRST_TOLD = 8  # after so many timed batches, and each time there are four times as many


class StepTimer:
    """Clocks around a batch of steps.

    Time in which the process could have run but others had the CPU counts neither as CPU time nor as waiting: the
    kernel says how long that was (``schedstat``). Where it does not, a batch in which the process never gave the CPU
    away of its own accord has waited for nothing.

    Attributes:
        batches_left: until the next one that is to be timed, that one included.
    """

    def __init__(self) -> None:
        self.batches_left = BATCHES_LEFT_OUT + 1
        self._batches = 0
        self._tell_at = FIRST_TOLD
        self._steps = self._cpu_ns = self._wait_ns = 0
        self._told = False  # whether those were worth telling; the next batch begins anew
        self._start: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
        try:
            self._schedstat = moved_up(os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self._schedstat = -1

    def close(self) -> None:
        """Free the descriptor."""
        if self._schedstat >= 0:
            os.close(self._schedstat)

    def start(self) -> None:
        """A batch that is to be timed begins."""
        gave_way, queued_ns = _gave_way(), self._queued_ns()
        wall_ns, own_cpu_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()
        # The clocks of what counts are read last here and first in ``stop``, so that reading the others does not count.
        self._start = gave_way, queued_ns, wall_ns, own_cpu_ns, cpu_ns

    def stop(self, steps: int) -> bool:
        """The batch has ended, in which so many envs were stepped; whether ``times`` are worth telling now."""
        cpu_ns, own_cpu_ns, wall_ns = time.process_time_ns(), time.thread_time_ns(), time.perf_counter_ns()
        end = _gave_way(), self._queued_ns(), wall_ns, own_cpu_ns, cpu_ns
        gave_way, queued_ns, wall_ns, own_cpu_ns, cpu_ns = (after - before for before, after in zip(self._start, end))
        if self._told:  # the first batches of a process are slower than those to come
            self._steps = self._cpu_ns = self._wait_ns = 0
        self._batches += 1
        self.batches_left = 1 if self._batches < EACH_UNTIL else ONE_IN
        self._steps += steps
        self._cpu_ns += cpu_ns
        if gave_way:  # by what other threads of the env compute meanwhile, it does not wait
            self._wait_ns += max(0, wall_ns - max(own_cpu_ns, cpu_ns) - queued_ns)
        self._told = self._batches >= self._tell_at
        if self._told:
            self._tell_at *= 4
        return self._told

    @property
    def times(self) -> StepTimes:
        """What was timed since the last telling; when ``stop`` has said that it is worth telling, until then."""
        return StepTimes(self._steps, self._cpu_ns, self._wait_ns)

    def _queued_ns(self) -> int:
        if self._schedstat < 0:
            return 0
        try:
            return int(os.pread(self._schedstat, 64, 0).split()[1])
        except (OSError, ValueError, IndexError):  # an env has closed it, or opened something else in its place
            self._schedstat = -1
            return 0


def _gave_way() -> int:
    """How often this thread has given the CPU away of its own accord, to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
