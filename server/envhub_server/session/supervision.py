"""The supervision of processes: hanging envs and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from envhub.protocol.messages import Faults
from envhub_server.session import failure_text
from envhub_server.session.calls import QUESTIONS
from envhub_server.session.deadlines import SAMPLE_S, Deadlines
from envhub_server.session.effects import Effects
from envhub_server.session.failure_text import Overrun
from envhub_server.session.hang_detector import Late, Progress
from envhub_server.session.slots import Process, SlotTable, Stage

MEMORY_S = 0.2  # between two measurements of processes with a memory limit
SAMPLE_IDLE_S = 1.0  # longest time between two samples, while the client drives and does not step
NO_TURN = -1  # the progress word of a process that maps an arena
STACKS_S = 2.0  # for a process on a busy machine to write its stacks before it is killed


class Supervision:
    """Judges the samples of the processes of one session."""

    def __init__(
        self, faults: Faults, memory_bytes_max: int, slots: SlotTable, deadlines: Deadlines, effects: Effects
    ) -> None:
        """End processes with more bytes of memory than the limit; 0 for no limit."""
        self._faults, self._memory_bytes_max = faults, memory_bytes_max
        self._slots, self._deadlines, self._effects = slots, deadlines, effects
        self._planned_s = SAMPLE_S  # the interval before the next sample
        self._idle_samples = 0

    @property
    def concerns_processes(self) -> bool:
        """True if a process is sampled without a pending request: it builds its envs or maps the arena."""
        if any(slot.process is not None and slot.serving is None for slot in self._slots):
            return True
        return any(spare.stage in (Stage.BUILDING, Stage.MAPPING) for spare in self._slots.spares.values())

    # --- samples ------------------------------------------------------------------------------------------------------

    def begin_idle(self) -> None:
        """Note that the client begins to drive."""
        self._idle_samples = 0

    def plan_next_sample(self, samples: bool, idle: bool, now_s: float) -> None:
        """Plan the next sample, if one is needed; the interval grows while the session is ``idle``."""
        if not samples:
            self._deadlines.sample_at_s = math.inf
            return
        self._idle_samples = self._idle_samples + 1 if idle else 0
        faults = self._faults
        longest_s = min(SAMPLE_IDLE_S, faults.init_s / 4, faults.step_s / 4, faults.reset_s / 4)
        self._planned_s = max(SAMPLE_S, min(longest_s, SAMPLE_S * self._idle_samples))
        self._deadlines.sample_at_s = now_s + self._planned_s

    def on_sampled(self, progress: Sequence[Progress | None], now_s: float) -> None:
        """Report envs that do not return, and end their processes after their deadlines."""
        for process in self._slots.processes:
            if process.stage is Stage.LEAVING or process.late is not None:
                continue
            late = self._sample(process, progress, now_s)
            if late is None:
                continue
            if late.expired:
                process.late, process.kill_at_s = late, now_s + STACKS_S
            self._effects.report_late(process.number, late)

    def _sample(self, process: Process, progress: Sequence[Progress | None], now_s: float) -> Late | None:
        detector, planned_s = process.detector, self._planned_s
        rows, slot = self._slots[process.place].rows, self._slots.of(process)
        if process.stage is Stage.MAPPING:
            return detector.sample(now_s, planned_s, "init", rows[0], NO_TURN)
        if process.stage is Stage.BUILDING:
            row = rows[min(process.built, len(rows) - 1)]
            return detector.sample(now_s, planned_s, "init", row, process.built)
        at = None if slot is None else progress[slot.index]
        if slot is not None and at is not None and isinstance(slot.pending, QUESTIONS):
            return detector.sample(now_s, planned_s, "call", at.row, at.turn)
        if at is not None and at.kind:
            return detector.sample(now_s, planned_s, at.kind, at.row, at.turn)
        detector.rest()  # the process waits for others or for a request
        return None

    # --- memory -------------------------------------------------------------------------------------------------------

    def measures(self, now_s: float) -> bool:
        """True if ``on_elapsed`` must have the memory of the processes."""
        return now_s >= self._deadlines.memory_at_s

    def on_measured(self, memory: Mapping[int, int], now_s: float) -> None:
        """End the processes that exceed their memory limit."""
        if not self.measures(now_s):
            return
        self._deadlines.memory_at_s = now_s + MEMORY_S
        bytes_max = self._memory_bytes_max or math.inf
        for number, nbytes in memory.items():
            process = self._slots.process(number)
            if nbytes > bytes_max and process is not None and process.overrun is None:
                process.overrun = Overrun(nbytes, int(bytes_max))
                self._effects.kill(number)

    def reason(self, number: int) -> str:
        """The reason why this process is killed; empty if it is not."""
        process = self._slots.process(number)
        why = None if process is None else process.killed_for
        return "" if why is None else failure_text.reason(why)
