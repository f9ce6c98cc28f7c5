"""The times at which a session acts by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from envhub_server.session.slots import SlotTable

SAMPLE_S = 0.1  # between two samples of the arena while envs are at work


@dataclass
class Deadlines:
    """Times on the monotonic clock; infinity where nothing is planned.

    Attributes:
        close_by_s: when the processes of a closing session are killed.
        drain_by_s: when a session of a hub that shuts down ends, whatever is under way.
        end_by_s: from when on no env of that hub gets more time to close.
        sample_at_s: when the arena is sampled.
        memory_at_s: when the memory of the processes is measured.
        spares_at_s: when spares are made again.
    """

    close_by_s: float = math.inf
    drain_by_s: float = math.inf
    end_by_s: float = math.inf
    sample_at_s: float = math.inf
    memory_at_s: float = math.inf
    spares_at_s: float = math.inf

    @property
    def draining(self) -> bool:
        """True if the hub shuts down, and the session has not ended for that yet."""
        return self.drain_by_s != math.inf

    def plan_sample(self, now_s: float) -> None:
        """Have the arena sampled soon, if envs are at work; a time that is past is of an earlier request."""
        if not now_s < self.sample_at_s <= now_s + SAMPLE_S:
            self.sample_at_s = now_s + SAMPLE_S

    def waits_for_spares(self, now_s: float) -> bool:
        """True if no spare is made now: the hub shuts down, or the last one could not make its envs."""
        return self.draining or now_s < self.spares_at_s < math.inf

    def next_s(self, slots: SlotTable, samples: bool, age_s: float) -> float:
        """The next time of a session that is not over; ``age_s`` is when a process is due for recycling."""
        planned = [self.close_by_s, self.drain_by_s, self.memory_at_s, age_s]
        if samples:
            planned.append(self.sample_at_s)
        if not self.draining:  # else no spare is made
            planned.append(self.spares_at_s)
        return min((*planned, *_of_slots(slots)))


def _of_slots(slots: SlotTable) -> Iterable[float]:
    for slot in slots:
        yield slot.restart_at_s
        yield slot.finish_at_s
    for process in slots.processes:
        yield process.kill_at_s
