"""The deadlines of a session."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from envhub_server.session.slots import SlotTable

SAMPLE_S = 0.1  # between two samples of the arena while envs run


@dataclass
class Deadlines:
    """Times on the monotonic clock; infinity if nothing is planned.

    Attributes:
        drain_by_s: time at which a session of a draining hub ends, even with a pending request.
        end_by_s: time after which no env of a draining hub gets more time to close.
        sample_at_s: time of the arena's next sample.
        memory_at_s: time of the next measurement of the processes' memory.
        spares_at_s: time after which spares are made again.
    """

    drain_by_s: float = math.inf
    end_by_s: float = math.inf
    sample_at_s: float = math.inf
    memory_at_s: float = math.inf
    spares_at_s: float = math.inf

    @property
    def draining(self) -> bool:
        """True if the hub drains, and the session has not ended yet."""
        return self.drain_by_s != math.inf

    def plan_sample(self, now_s: float) -> None:
        """Plan a sample of the arena soon, if envs run; a time in the past belongs to an earlier request."""
        if not now_s < self.sample_at_s <= now_s + SAMPLE_S:
            self.sample_at_s = now_s + SAMPLE_S

    def waits_for_spares(self, now_s: float) -> bool:
        """True if no spare is made now: the hub drains, or the last spare could not make its envs."""
        return self.draining or now_s < self.spares_at_s < math.inf

    def next_s(self, slots: SlotTable, samples: bool, age_s: float) -> float:
        """The next deadline of a live session; ``age_s`` is the time at which a process is due for recycling."""
        planned = [self.drain_by_s, self.memory_at_s, age_s]
        if samples:
            planned.append(self.sample_at_s)
        if not self.draining:  # a draining hub makes no spares
            planned.append(self.spares_at_s)
        return min((*planned, *_of_slots(slots)))


def _of_slots(slots: SlotTable) -> Iterable[float]:
    for slot in slots:
        yield slot.restart_at_s
        yield slot.finish_at_s
    for process in slots.processes:
        yield process.kill_at_s
