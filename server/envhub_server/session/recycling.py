"""Recycling: the replacement of a process that is old or large, or has run many episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from envhub.protocol.messages import Make
from envhub_server.ipc import control
from envhub_server.session import instructions as do
from envhub_server.session.deadlines import Deadlines
from envhub_server.session.instructions import Instructions
from envhub_server.session.launcher import Launcher
from envhub_server.session.slots import Process, Slot, SlotTable, Stage
from envhub_server.session.spares import Spares


class Recycling:
    """Decides which processes of one session are recycled, and prepares their successors."""

    def __init__(
        self, make: Make, is_vector: bool, slots: SlotTable, launcher: Launcher, spares: Spares, deadlines: Deadlines
    ) -> None:
        self._never_between = is_vector and make.autoreset_mode == "SameStep"
        self._slots, self._launcher, self._spares, self._deadlines = slots, launcher, spares, deadlines

    # --- which are due ------------------------------------------------------------------------------------------------

    def next_age_s(self) -> float:
        """The time at which the next process reaches a limit of its age."""
        age_s = self._launcher.rules.hosting.recycle.age_s
        if not age_s:
            return math.inf
        return min((self._limit_since(slot)[0] + age_s for slot in self._slots), default=math.inf)

    def _limit_since(self, slot: Slot) -> tuple[float, float]:
        """The time and the memory from which the next limit counts; infinity if there is no next limit.

        The first limit counts from the time at which the process began to serve. The second one counts from the
        successor's readiness, and after it the episodes are cut: several envs of a slot may never be between episodes
        at the same time, and a vector env that resets them within a step never is.
        """
        leaves_by_itself = len(slot.rows) == 1 and not self._never_between
        if slot.serving is None or slot.overdue or (slot.due_for_recycling and leaves_by_itself):
            return math.inf, math.inf
        return (slot.leaves_since_s, slot.leaves_bytes) if slot.due_for_recycling else (slot.serves_since_s, 0)

    def on_episodes_done(self, slot: Slot, done: control.EpisodesDone, now_s: float) -> Instructions:
        """Note that a process has reached its number of episodes, or the same number once more."""
        since_s, _ = self._limit_since(slot)
        due = since_s < math.inf and done.leaving == slot.due_for_recycling
        return [*(self._make_due(slot) if due else ()), *self.recycle(now_s)]

    def on_measured(self, memory: Mapping[int, int], now_s: float) -> Instructions:
        """Note which processes have exceeded their age or memory."""
        recycle = self._launcher.rules.hosting.recycle
        instructions: Instructions = []
        for slot in self._slots:
            if slot.process is not None:
                slot.nbytes = memory.get(slot.process.number, slot.nbytes)
            since_s, nbytes = self._limit_since(slot)
            old = recycle.age_s and now_s >= since_s + recycle.age_s
            large = recycle.memory_bytes and slot.nbytes > nbytes + recycle.memory_bytes
            if old or large:
                instructions += self._make_due(slot)
        return instructions

    def _make_due(self, slot: Slot) -> Instructions:
        """Have a process recycled between episodes; if it already is, during them."""
        if not slot.due_for_recycling:
            slot.due_for_recycling = True
            return []
        # The second limit counts from the readiness of the next successor, if this one has ended.
        if self._slots.successor_of(slot) is None:
            slot.leaves_since_s = slot.leaves_bytes = math.inf
            return []
        slot.overdue = True
        return _tell(slot, control.Leave(cut=True))

    # --- successors ---------------------------------------------------------------------------------------------------

    def recycle(self, now_s: float) -> Instructions:
        """Have successors built, one at a time, so that the other workers keep the CPUs.

        A slot gets none while its last process still closes its envs, so that a slot never has more than two processes.
        """
        if self._deadlines.waits_for_spares(now_s):
            return []
        spares = self._slots.spares.values()
        if any(spare.successor and spare.stage is Stage.BUILDING for spare in spares):
            return []
        succeeded = {spare.place for spare in spares if spare.successor or spare.stage is Stage.LEAVING}
        due = [slot for slot in self._slots if slot.due_for_recycling and slot.index not in succeeded and not slot.loss]
        if not due:
            return []
        slot = min(due, key=lambda each: each.serves_since_s)  # the oldest first, so that every slot gets its turn
        spare = self._spares.fit_for(slot)
        if spare is None:
            return self._launcher.start_spare(slot, True, now_s)
        spare.successor, spare.place = True, slot.index
        return [*self.prepare(spare), *self._spares.fill(now_s), *self.recycle(now_s)]

    def prepare(self, process: Process) -> Instructions:
        """Hand the arena to a successor whose envs are made, so that it can take over at once."""
        if not process.successor or process.stage is not Stage.BUILT:
            return []
        return [self._launcher.tell_place(process), self._launcher.map(process)]

    def have_leave(self, slot: Slot, now_s: float) -> Instructions:
        """Tell the process of a slot whose successor is ready to leave between episodes."""
        slot.leaves_since_s, slot.leaves_bytes = now_s, slot.nbytes
        return _tell(slot, control.Leave())


def _tell(slot: Slot, message: control.Leave) -> Instructions:
    assert slot.process is not None
    return [do.Tell(slot.process.number, message)]
