"""Recycling: the planned end of a process that is old or large, or has run many episodes.

A spare is made first. Then the process is told to leave its rows, and its slot gets the spare as if the process had
ended. A process of one env leaves between two episodes. One of several envs, or with SAME_STEP, leaves at once, and its
envs that are in an episode are truncated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from envhub.protocol.messages import Make
from envhub_server.ipc import control
from envhub_server.session.deadlines import Deadlines
from envhub_server.session.effects import Effects
from envhub_server.session.launcher import Launcher
from envhub_server.session.slots import Slot, SlotTable, Stage
from envhub_server.session.spares import Spares


class Recycling:
    """Decides which processes of one session are recycled, and when."""

    def __init__(
        self,
        make: Make,
        slots: SlotTable,
        launcher: Launcher,
        spares: Spares,
        deadlines: Deadlines,
        effects: Effects,
    ) -> None:
        self._cuts_all = make.autoreset_mode == "SameStep"
        self._slots, self._launcher, self._spares, self._deadlines = slots, launcher, spares, deadlines
        self._effects = effects

    def next_age_s(self) -> float:
        """The time at which the next process reaches its age."""
        age_s = self._launcher.rules.hosting.recycle.age_s or math.inf
        serving = (slot for slot in self._slots if slot.serving is not None and not slot.due_for_recycling)
        return min((slot.serves_since_s + age_s for slot in serving), default=math.inf)

    def on_episodes_done(self, slot: Slot, now_s: float) -> None:
        """Note that a process has reached its number of episodes."""
        slot.due_for_recycling = slot.serving is not None
        self.recycle(now_s)

    def on_measured(self, memory: Mapping[int, int], now_s: float) -> None:
        """Note which processes have exceeded their age or memory."""
        recycle = self._launcher.rules.hosting.recycle
        for slot in self._slots:
            if slot.serving is None:
                continue
            nbytes = memory.get(slot.serving.number, 0)
            is_old = recycle.age_s and now_s >= slot.serves_since_s + recycle.age_s
            if is_old or (recycle.memory_bytes and nbytes > recycle.memory_bytes):
                slot.due_for_recycling = True

    def recycle(self, now_s: float) -> None:
        """Have processes leave for which spares are ready, the oldest first, and have one more spare made.

        A slot waits while its last process still closes its envs, so that it never has more than two processes.
        """
        if self._deadlines.waits_for_spares(now_s):
            return
        spares = self._slots.spares.values()
        closing = {spare.place for spare in spares if spare.stage is Stage.LEAVING}
        due = [slot for slot in self._slots if slot.due_for_recycling and slot.serving and slot.index not in closing]
        for slot in sorted(due, key=lambda each: each.serves_since_s):
            assert slot.process is not None
            if slot.told_to_leave:
                continue
            if self._spares.free_for(slot):
                slot.told_to_leave = True
                cut = self._cuts_all or len(slot.rows) > 1
                self._effects.tell(slot.process.number, control.Leave(cut))
                self._spares.fill(now_s)
            elif not any(spare.stage is Stage.BUILDING for spare in spares):
                self._launcher.start_spare(slot, now_s)
