"""Memory of the workers of clients that have a quota of it: measured one client at a time."""

from __future__ import annotations

from operator import itemgetter

from envhub_server.hub.directory import Directory
from envhub_server.loop.loop import Loop
from envhub_server.network.access import Access
from envhub_server.session.failure_text import Overrun

MEASURE_S = 0.2  # from one client's measurement to the next client's


class MemoryQuotas:
    """Measures the workers of each client with a quota of memory. It owns the last measurements."""

    def __init__(self, access: Access, directory: Directory, loop: Loop) -> None:
        """Measure the sessions of ``directory``, by the quotas of ``access``."""
        self._access, self._directory, self._loop = access, directory, loop
        self._is_planned = False
        self._measured = ""  # the client whose workers were measured last
        # Of each client the bytes that its workers had when they were last measured, and how many they may have.
        self._memory: dict[str, tuple[int, int]] = {}

    def excess(self, name: str) -> str:
        """The reason why the client may have no more memory in its workers; empty if it may, or without a sample."""
        has, bytes_max = self._memory.get(name, (0, 0))
        if has <= bytes_max:
            return ""
        return f"the workers of {name} have {has} bytes of memory, of worker_memory_bytes_max={bytes_max} of its key"

    def plan(self) -> None:
        """Measure soon; does nothing while that is planned, so a client that makes sessions delays no measurement."""
        if not self._is_planned:
            self._is_planned = True
            self._loop.schedule.set(self._measure, self._loop.clock.now_s() + MEASURE_S)

    def _measure(self) -> None:
        """Measure the workers of the next client with a quota of memory, and end the largest if it has too much."""
        self._is_planned = False
        limits = {name: quotas.worker_memory_bytes_max for name, quotas in self._access.quotas.items()}
        owners = sorted({each.owner for each in self._directory.sessions if limits.get(each.owner)})
        self._memory = {name: sample for name, sample in self._memory.items() if name in owners}
        if not owners:
            return
        self._measured = name = next((each for each in owners if each > self._measured), owners[0])
        self._end_largest(name, limits[name])
        self.plan()

    def _end_largest(self, name: str, bytes_max: int) -> None:
        """End the largest workers of a client, so that the others have no more than this.

        A worker's memory of its zygote does not count, for all have that in common.
        """
        own = [each for each in self._directory.sessions if each.owner == name]
        samples = [(nbytes, each, worker) for each in own for worker, nbytes in each.memory.items()]
        total = left = sum(nbytes for nbytes, _, _ in samples)
        self._memory[name] = total, bytes_max
        for nbytes, runtime, worker in sorted(samples, key=itemgetter(0), reverse=True):
            if left <= bytes_max:
                break
            left -= nbytes
            runtime.overrun(worker, Overrun(nbytes, bytes_max, name, total))
