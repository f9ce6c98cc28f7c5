"""Processes that are built in advance, and serve a slot as soon as its process ends."""

from __future__ import annotations

import math

from envhub.protocol.messages import Make
from envhub_server.session.deadlines import Deadlines
from envhub_server.session.launcher import Launcher
from envhub_server.session.restarts import Restarts
from envhub_server.session.slots import Process, Slot, SlotTable, Stage

SPARE_RETRY_S = 1.0  # delay before an ended spare is replaced; it doubles with each consecutive end
SPARE_RETRY_MAX_S = 60.0


class Spares:
    """The spares of one session."""

    def __init__(
        self,
        make: Make,
        is_vector: bool,
        slots: SlotTable,
        launcher: Launcher,
        restarts: Restarts,
        deadlines: Deadlines,
    ) -> None:
        self._make, self._is_vector = make, is_vector
        self._slots, self._launcher, self._restarts, self._deadlines = slots, launcher, restarts, deadlines
        self.failed = 0  # consecutive spares that could not make their envs

    @property
    def wanted(self) -> int:
        """The wanted number of spares."""
        return self._launcher.rules.hosting.spares or 0

    @property
    def unused(self) -> int:
        """The number of spares that no process which leaves is to be replaced by."""
        spares = self._slots.spares.values()
        return sum(spare.stage is not Stage.LEAVING for spare in spares) - sum(map(_leaves, self._slots))

    def fill(self, now_s: float) -> None:
        """Start processes until the wanted number of spares exists."""
        if self._deadlines.waits_for_spares(now_s):
            return
        self._deadlines.spares_at_s = math.inf
        while self.unused < self.wanted:
            self._launcher.start_spare(self._next_slot(), now_s)

    def on_built(self) -> None:
        """Note that a spare has made its envs."""
        self.failed = 0

    def on_exited(self, now_s: float) -> None:
        """Plan the replacement of an ended spare."""
        retry_s = min(SPARE_RETRY_MAX_S, SPARE_RETRY_S * 2.0 ** min(self.failed, 64))
        self.failed += 1
        self._deadlines.spares_at_s = now_s + retry_s

    def _group(self, slot: Slot) -> tuple[int, int]:
        """The group of a slot; slots of a group have equal envs and the same device, and share spares."""
        if self._make.kwargs_each or (self._make.factories and not self._make.alike):
            return slot.index, 0
        envs = len(slot.rows) if self._is_vector else 0  # a vector env has a fixed number of rows
        return slot.index % max(1, len(self._launcher.rules.hosting.gpus)), envs

    def _group_of(self, spare: Process) -> tuple[int, int]:
        return self._group(self._slots[spare.place])

    def _next_slot(self) -> Slot:
        """The slot for which the next spare is made: first of the group with the fewest spares, then the most restarts.

        Within a group it is the first slot, because no slot of the group has more rows.
        """
        groups = [self._group_of(spare) for spare in self._slots.spares.values()]
        first: dict[tuple[int, int], Slot] = {self._group(slot): slot for slot in reversed([*self._slots])}
        count = self._restarts.count
        return min(first.values(), key=lambda s: (groups.count(self._group(s)), -count(s.index), s.index))

    def _fit_for(self, slot: Slot) -> list[Process]:
        """The spares that can serve this slot at once."""
        group = self._group(slot)
        ready = [each for each in self._slots.spares.values() if each.stage is Stage.BUILT and not each.killed_for]
        return [each for each in ready if self._group_of(each) == group]

    def fit_for(self, slot: Slot) -> Process | None:
        """A spare that can serve this slot at once."""
        return next(iter(self._fit_for(slot)), None)

    def free_for(self, slot: Slot) -> bool:
        """True if a spare can serve this slot at once, besides those for slots whose processes leave."""
        group = self._group(slot)
        return len(self._fit_for(slot)) > sum(_leaves(each) and self._group(each) == group for each in self._slots)


def _leaves(slot: Slot) -> bool:
    return slot.told_to_leave and slot.serving is not None
