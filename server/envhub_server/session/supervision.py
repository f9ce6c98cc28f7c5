"""The supervision of processes: envs that hang, and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from envhub.protocol.messages import Faults
from envhub_server.session import failure_text, stimuli
from envhub_server.session import instructions as do
from envhub_server.session.calls import QUESTIONS
from envhub_server.session.deadlines import SAMPLE_S, Deadlines
from envhub_server.session.failure_text import Overrun
from envhub_server.session.hang_detector import Late, Progress
from envhub_server.session.instructions import Instructions
from envhub_server.session.slots import Process, SlotTable, Stage

MEMORY_S = 0.2  # between two measurements of the memory of processes, where it has a limit
SAMPLE_IDLE_S = 1.0  # between two samples at most, while the client drives and does not step
NO_TURN = -1  # in place of a progress word, while a process maps an arena
STACKS_S = 1.0  # for a process on a busy machine to write where its threads are, before it is killed


class Supervision:
    """Judges the samples of the processes of one session."""

    def __init__(self, faults: Faults, memory_bytes_max: int, slots: SlotTable, deadlines: Deadlines) -> None:
        """End processes with more memory than this; 0 for no limit."""
        self._faults, self._memory_bytes_max = faults, memory_bytes_max
        self._slots, self._deadlines = slots, deadlines
        self._planned_s = SAMPLE_S  # after the last sample, for the next one
        self._idle_samples = 0

    @property
    def concerns_processes(self) -> bool:
        """True if a process is sampled though no request is under way: it makes its envs or maps the arena."""
        if any(slot.process is not None and slot.serving is None for slot in self._slots):
            return True
        return any(spare.stage in (Stage.BUILDING, Stage.MAPPING) for spare in self._slots.spares.values())

    # --- samples ------------------------------------------------------------------------------------------------------

    def begin_idle(self) -> None:
        """Note that the client drives from now on."""
        self._idle_samples = 0

    def plan_next_sample(self, samples: bool, idle: bool, now_s: float) -> None:
        """Plan the next sample, if there is one: soon, or the later the longer the session is ``idle``."""
        if not samples:
            self._deadlines.sample_at_s = math.inf
            return
        self._idle_samples = self._idle_samples + 1 if idle else 0
        faults = self._faults
        longest_s = min(SAMPLE_IDLE_S, faults.init_s / 4, faults.step_s / 4, faults.reset_s / 4)
        self._planned_s = max(SAMPLE_S, min(longest_s, SAMPLE_S * self._idle_samples))
        self._deadlines.sample_at_s = now_s + self._planned_s

    def on_sampled(self, progress: Sequence[Progress | None], now_s: float) -> Instructions:
        """Report the envs that do not return, and end their processes once their time is over."""
        instructions: Instructions = []
        for process in self._slots.processes:
            instructions += self._judge(process, progress, now_s)
        return instructions

    def _judge(self, process: Process, progress: Sequence[Progress | None], now_s: float) -> Instructions:
        if process.stage is Stage.LEAVING or process.late is not None:
            if now_s < process.kill_at_s:
                return []
            process.kill_at_s = math.inf
            return [do.Kill(process.number)]
        late = self._sample(process, progress, now_s)
        if late is None:
            return []
        if late.over:
            process.late, process.kill_at_s = late, now_s + STACKS_S
        return [do.ReportLate(process.number, late)]

    def _sample(self, process: Process, progress: Sequence[Progress | None], now_s: float) -> Late | None:
        detector, planned_s = process.detector, self._planned_s
        rows, slot = self._slots[process.place].rows, self._slots.of(process)
        if process.moving or process.stage is Stage.MAPPING:
            return detector.sample(now_s, planned_s, "init", rows[0], NO_TURN)
        if process.stage is Stage.BUILDING:
            row = rows[min(process.built, len(rows) - 1)]
            return detector.sample(now_s, planned_s, "init", row, process.built)
        at = None if slot is None else progress[slot.index]
        if slot is not None and at is not None and isinstance(slot.pending, QUESTIONS):
            return detector.sample(now_s, planned_s, "call", at.row, at.turn)
        if at is not None and at.kind:
            return detector.sample(now_s, planned_s, at.kind, at.row, at.turn)
        detector.rest()  # it waits for the others, or for a request
        return None

    # --- memory -------------------------------------------------------------------------------------------------------

    def measures(self, now_s: float) -> bool:
        """True if ``Elapsed`` is to say how much memory the processes have."""
        return now_s >= self._deadlines.memory_at_s

    def on_measured(self, memory: Mapping[int, int], now_s: float) -> Instructions:
        """End the processes that have more memory than they may."""
        if not self.measures(now_s):
            return []
        self._deadlines.memory_at_s = now_s + MEMORY_S
        killed: Instructions = []
        bytes_max = self._memory_bytes_max or math.inf
        for number, nbytes in memory.items():
            if nbytes > bytes_max:
                killed += self._end(number, Overrun(nbytes, int(bytes_max)))
        return killed

    def overruns(self, number: int) -> bool:
        """True if this process is killed for the memory that it has."""
        process = self._slots.process(number)
        return process is not None and process.overrun is not None

    def reason(self, number: int) -> str:
        """The reason why this process is killed; empty if it is not."""
        process = self._slots.process(number)
        why = None if process is None else process.killed_for
        return "" if why is None else failure_text.reason(why)

    def on_quota_overrun(self, found: stimuli.QuotaOverrun) -> Instructions:
        """End the process that has the most memory of all of a client."""
        return self._end(found.process, found.overrun)

    def _end(self, number: int, overrun: Overrun) -> Instructions:
        process = self._slots.process(number)
        if process is None or process.overrun is not None:
            return []
        process.overrun = overrun
        return [do.Kill(number)]
