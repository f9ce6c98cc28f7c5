"""The replacement of processes that have ended or leave their rows."""

from __future__ import annotations

import math
from dataclasses import replace

from envhub.env_failure import EnvFailure
from envhub.protocol.messages import Failure, Make
from envhub_server.ipc import control
from envhub_server.processes.worker_handle import WorkerExited
from envhub_server.session import failure_text
from envhub_server.session.closing import EnvClosing
from envhub_server.session.env_history import EnvHistory
from envhub_server.session.failure_text import Overrun
from envhub_server.session.hang_detector import Late
from envhub_server.session.launcher import Launcher
from envhub_server.session.recycling import Recycling
from envhub_server.session.replay_orders import ReplayOrders
from envhub_server.session.restarts import Restarts
from envhub_server.session.slots import Process, Slot, SlotTable, Stage
from envhub_server.session.spares import Spares


class Replacement:
    """Has another process serve a slot. A method returns a ``Failure`` if the session has broken."""

    def __init__(
        self,
        make: Make,
        slots: SlotTable,
        launcher: Launcher,
        restarts: Restarts,
        history: EnvHistory,
        replays: ReplayOrders,
        spares: Spares,
        recycling: Recycling,
        closing: EnvClosing,
    ) -> None:
        self._make, self._slots, self._launcher, self._restarts = make, slots, launcher, restarts
        self._history, self._replays, self._effects = history, replays, launcher.effects
        self.spares, self.recycling, self._closing = spares, recycling, closing

    # --- losses -------------------------------------------------------------------------------------------------------

    def on_lost(self, slot: Slot, exited: WorkerExited, why: Late | Overrun | None, now_s: float) -> Failure | None:
        """Have the hub take the rows of a slot whose process has ended, until its replacement serves."""
        rules, number = self._launcher.rules, exited.process
        failure = failure_text.failure(self._make, slot.index, slot.rows, exited.cause, why, rules.hide_folders)
        was_serving = slot.loss is None
        if slot.boot_failure is not None:
            failure = replace(failure, message=f"{failure.message}; before that: {slot.boot_failure.message}")
            slot.boot_failure = None
        delay_s = self._restarts.ended(slot.index, now_s, exited.cause.started)
        count = self._restarts.count(slot.index)
        if was_serving and self._replays.prefix:
            failure = replace(failure, replay=f"{self._replays.prefix}-worker{slot.index}-{count}")
        env_failure = failure_text.env_failure(failure, exited.cause, why, count - 1)
        self._replays.keep(slot, number, env_failure)
        if delay_s is None:
            return self._exhausted(slot, failure)
        slot.restart_at_s = now_s + delay_s
        slot.loss = failure_text.loss(failure, env_failure, self._make.faults)
        resetting = tuple(slot.pending.rows) if isinstance(slot.pending, control.ResetRows) else None
        self._effects.take_rows(slot.index, number, slot.loss, resetting)
        return None

    def on_faulted(self, slot: Slot, fault: control.Faulted, now_s: float) -> Failure | None:
        """Count a failure of an env that its worker truncated and rebuilt."""
        env_failure = EnvFailure.from_map(fault.failure)
        self._replays.of_env(slot, fault.row, fault.number, fault.trace, env_failure)
        if self._restarts.faulted(slot.index, now_s):
            return None
        text = f"env {self._make.row_offset + fault.row} raised {fault.message}"
        failure = Failure("worker_died", "request", text, env_index=fault.row, worker=slot.index)
        return self._exhausted(slot, failure)

    def _exhausted(self, slot: Slot, failure: Failure) -> Failure:
        return failure_text.exhausted(failure, self._restarts.count_text(slot.index))

    def on_rows_waiting(self, slot: Slot, now_s: float) -> None:
        """Note that steps wait for the next process of a slot."""
        if slot.loss is not None:
            slot.finish_at_s = min(slot.finish_at_s, now_s + self._make.faults.restart_wait_s)

    def finish_steps(self, now_s: float) -> None:
        """Complete the steps that have waited too long for their slot's next process."""
        for slot in self._slots:
            if now_s >= slot.finish_at_s:
                slot.finish_at_s = math.inf
                assert slot.loss is not None
                self._effects.finish_steps(slot.index, slot.loss)

    def restart(self, now_s: float) -> None:
        """Start a process for each slot whose restart is due."""
        self._launcher.start([slot for slot in self._slots if now_s >= slot.restart_at_s], now_s)

    # --- the next process ---------------------------------------------------------------------------------------------

    def on_built(self, process: Process, now_s: float) -> None:
        """Hand the arena to a slot's process that has made its envs; a spare is kept, or serves a slot that waits."""
        slot = self._slots.of(process)
        if process.stage is not Stage.BUILDING:
            return
        process.stage, process.built = Stage.BUILT, len(self._slots[process.place].rows)
        if slot is not None:
            self._launcher.map(process)
            return
        self.spares.on_built()
        self.replace_lost(now_s)
        self.recycling.recycle(now_s)

    def on_mapped(self, process: Process, now_s: float) -> None:
        """Have a process that has mapped the arena serve its slot."""
        slot = self._slots.of(process)
        if process.stage is Stage.MAPPING and slot is not None:
            self._restarts.serves(slot.index, now_s)
            self.hand_over(slot, now_s)

    def hand_over(self, slot: Slot, now_s: float) -> None:
        """Have the process of a slot serve its rows."""
        process, loss = slot.process, slot.loss
        assert process is not None
        process.stage = Stage.SERVING
        process.detector.rest()
        slot.loss, slot.boot_failure, slot.finish_at_s = None, None, math.inf
        slot.serves_since_s, slot.due_for_recycling, slot.told_to_leave = now_s, False, False
        seeds = self._history.seeds(slot, self._restarts.count(slot.index) + slot.recycled)
        failure, info = (loss.failure if loss.raises else None, loss.info) if loss is not None else (None, b"")
        for message in self._history.attributes(slot):
            self._effects.tell(process.number, message)
        self._effects.hand_over(slot.index, process.number, control.Serve(seeds, failure, info), slot.pending)

    def replace_lost(self, now_s: float) -> None:
        """Have spares serve the slots without a ready process; a process that still builds its envs becomes a spare."""
        for slot in self._slots:
            if slot.loss is None or slot.stage not in (None, Stage.BUILDING):
                continue
            chosen = self.spares.fit_for(slot)
            if chosen is None:
                continue
            left = self._slots.assign(slot, chosen)
            # There is one spare too many if the spare was made to recycle a process.
            if left is not None and self.spares.unused > self.spares.wanted:
                left.leave()
                self._effects.kill(left.number)
            self._effects.assign(slot.index, chosen.number)
            self._launcher.tell_place(chosen)
            self._launcher.map(chosen)
        self.spares.fill(now_s)

    def on_left(self, slot: Slot, now_s: float) -> None:
        """Have the hub take the rows of a slot whose process has left, until a spare serves; the process closes."""
        process = slot.process
        assert process is not None
        slot.recycled += 1
        slot.loss = failure_text.recycled(self._make, slot.index, slot.rows)
        self._effects.take_rows(slot.index, process.number, slot.loss, None, left=True)
        self._closing.ask(process, now_s)
        self._slots.vacate(slot, process)
        self.replace_lost(now_s)
        if slot.process is None:  # the spare has ended meanwhile
            self._launcher.start([slot], now_s)
        self.recycling.recycle(now_s)

    def on_spare_exited(self, was_leaving: bool, now_s: float) -> None:
        """Handle the end of a process that served no slot."""
        if was_leaving:
            self.recycling.recycle(now_s)
        else:
            self.spares.on_exited(now_s)
