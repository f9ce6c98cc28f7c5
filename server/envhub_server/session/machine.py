"""One session as a pure state machine: it is told what has happened by its methods, and answers by effects.

It knows no socket, process, memory or clock. ``hub.runtime`` tells it, with the time, and carries out its ``effects``.
Effects only act or enqueue: what comes of one is told after the method that called it has returned, so the machine is
never re-entered. It makes every decision about a session: which requests are executed, what a client learns of an ended
process and when it is replaced, which env hangs, how another client takes over, and when the session ends. It also
decides who drives: the hub or the client, which posts the rows' requests in the arena.

``SessionState`` keeps the phase and everything else that a session knows. ``ClientEvents`` and ``SessionMachine`` have
the methods by which it is told; their decorators say in which phase each is allowed, and which phases may follow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from envhub.env_failure import EnvFailure
from envhub.protocol.messages import Failure
from envhub_server.ipc import control
from envhub_server.processes.worker_handle import ExitCause, WorkerExited, WorkerMessage
from envhub_server.session.client_events import ClientEvents
from envhub_server.session.requests import refusal
from envhub_server.session.slots import Process, Progress, Slot, Stage
from envhub_server.session.state import (
    HANDLERS,
    LIVE,
    MAKING,
    OVER,
    SERVING,
    Driver,
    LaneName,
    Phase,
    allowed_in,
    handles,
)
from envhub_server.session.supervision import MEMORY_S

# Messages of a process that are handled also while it serves no slot; its other messages are ignored then.
WITHOUT_SLOT = (control.Building, control.Built, control.Mapped, control.NotRepeated, control.Closing)


class SessionMachine(ClientEvents):
    """The state of a session, and all that it can be told: by its client, its processes, and the passing of time.

    A method that handles a message of a process is called for one that serves a slot or, if ``WITHOUT_SLOT`` has the
    message, for any.
    """

    def on_message(self, now_s: float, sent: WorkerMessage) -> None:
        """Handle a message of a process, unless it is stale or irrelevant."""
        process, kind = self.slots.process(sent.process), type(sent.message)
        if process is None:
            return
        slot = self.slots.of(process)
        if slot is None and kind not in WITHOUT_SLOT:
            return
        if slot is not None and not sent.current and slot.loss is None:
            fields = {"worker": slot.index, "message": kind.__name__, "of": sent.message.number}
            # Event: A worker answered a request that has ended; it is ignored.
            self.effects.warn("stale_answer_dropped", fields)
        elif process.rebuild:
            pass  # the process is about to be killed, and its envs are made again
        elif kind not in HANDLERS and self.phase not in OVER:
            self.abandon(refusal(f"worker {process.slot_index} sent a {kind.__name__}"), now_s)
        elif handler := HANDLERS.get(kind, {}).get(self.phase):
            handler(self, now_s, process, sent.message)
        # Without a handler, the process sent it before it learned of this phase.

    # --- making -------------------------------------------------------------------------------------------------------

    @allowed_in(Phase.BUILDING)
    def on_made(self, now_s: float) -> None:
        hosting = self.launcher.rules.hosting
        if hosting.memory_max or hosting.recycle.memory_bytes:
            self.deadlines.memory_at_s = now_s + MEMORY_S
        self.building.on_session_made(now_s)

    @handles(control.Building, Phase.BUILDING, *SERVING)
    def on_building(self, now_s: float, process: Process, building: control.Building) -> None:
        process.built, process.importing = building.built, building.importing

    @handles(control.Imported, Phase.BUILDING)
    def on_imported(self, now_s: float, process: Process, imported: control.Imported) -> None:
        self.building.on_imported(process, imported, now_s)

    @handles(control.FirstBuilt, Phase.BUILDING)
    def on_first_built(self, now_s: float, process: Process, built: control.FirstBuilt) -> None:
        self.building.on_first_built(process, built, now_s)

    @handles(control.Built, Phase.BUILDING, then=(Phase.MAPPING, Phase.CLOSING))
    @handles(control.Built, *SERVING)
    def on_built(self, now_s: float, process: Process, built: control.Built) -> None:
        """Make the arena, once all envs are made; later hand the arena to the process, or keep it as a spare."""
        if self.making:
            self._go_on(self.building.on_built(process, built, now_s), now_s)
        else:
            self.replacement.on_built(process, now_s)

    @allowed_in(Phase.MAPPING, then=(Phase.CLOSING,))
    @allowed_in(Phase.CLOSING)
    def on_arena_refused(self, now_s: float, reason: str) -> None:
        """End the session: the shared memory that it needs is not available."""
        if self.making:
            self.abandon(Failure("limit", "hub", reason), now_s)

    @handles(control.Mapped, Phase.MAPPING, then=(Phase.READY,))
    @handles(control.Mapped, *SERVING)
    def on_mapped(self, now_s: float, process: Process, _: control.Mapped) -> None:
        """Have a process that has mapped the arena serve; the first ones once all have mapped it."""
        if process.is_restored and self.slots.of(process) is None:
            self.on_snapshot_advanced(self.snapshots.on_mapped(process, now_s))
            return
        if not self.making:
            self.replacement.on_mapped(process, now_s)
            return
        made = self.building.on_mapped(process, now_s)
        if made is None:
            return
        self.phase, make = Phase.READY, self.make
        self.made = replace(made, autoreset_mode=make.autoreset_mode, observation_mode=make.observation_mode)
        self.building.serve(now_s)
        self.answer(made)
        self.advance_takeover(True)
        self.replacement.spares.fill(now_s)

    def _go_on(self, failure: Failure | None, now_s: float) -> None:
        if failure is not None:
            self.abandon(failure, now_s)
        elif self.launcher.arena is not None:
            self.phase = Phase.MAPPING

    # --- ends of processes --------------------------------------------------------------------------------------------

    @allowed_in(*MAKING, then=(Phase.CLOSING, Phase.ENDED))
    @allowed_in(*SERVING, then=(Phase.BROKEN,))
    @allowed_in(Phase.BROKEN)
    @allowed_in(Phase.CLOSING, then=(Phase.ENDED,))
    def on_not_started(self, now_s: float, processes: tuple[int, ...], reason: str) -> None:
        """Continue without the processes of these numbers, none of which could be started."""
        if self.making:
            self.abandon(Failure("limit", "hub", f"a worker cannot be started: {reason}"), now_s)
        cause = ExitCause(f"cannot be started: {reason}", started=False)
        for number in processes:
            self._end_process(now_s, WorkerExited(number, cause))

    @allowed_in(*MAKING, then=(Phase.CLOSING, Phase.ENDED))
    @allowed_in(*SERVING, then=(Phase.BROKEN,))
    @allowed_in(Phase.BROKEN)
    @allowed_in(Phase.CLOSING, then=(Phase.ENDED,))
    def on_exited(self, now_s: float, exited: WorkerExited) -> None:
        """Go on without this process; one of a number below zero was a snapshot."""
        if exited.process < 0:
            self.on_snapshot_advanced(self.snapshots.on_ended(-exited.process, exited.cause.how))
        else:
            self._end_process(now_s, exited)

    def _end_process(self, now_s: float, exited: WorkerExited) -> None:
        process = self.slots.process(exited.process)
        if process is None:
            return
        slot, why, was_leaving = self.slots.of(process), process.killed_for, process.stage is Stage.LEAVING
        self.slots.end(process)
        if slot is not None:
            self.on_snapshot_advanced(self.snapshots.on_worker_lost(slot.rows[0]))
        self.closing.on_ended(process, f"the process {exited.cause.how}")
        if self.phase is Phase.CLOSING:
            if not self.slots.processes:
                self.end()
        elif self.phase is Phase.BROKEN:
            self.closing.tell()
        elif slot is None and process.is_restored and not was_leaving:
            why_not = f"cannot be restored: its process {exited.cause.how}"
            self.on_snapshot_advanced(self.snapshots.on_restored_ended(process, why_not))
        elif slot is None:
            self.closing.tell()
            if was_leaving:
                self.replacement.recycle(now_s)
            else:
                self.replacement.spares.on_exited(now_s)
        elif slot.successor is not None:
            self.on_snapshot_advanced(self.snapshots.on_left(slot, now_s))
        elif self.making:
            self._go_on(self.building.on_exited(process, exited, why, now_s), now_s)
        elif broken := self.replacement.on_lost(slot, exited, why, now_s):
            self.break_down(broken)
        else:
            self.replacement.replace_lost(now_s)

    @allowed_in(*LIVE)
    def on_restart_ordered(self, now_s: float, row: int, text: str) -> None:
        """End the process of this row's env, and start it again; ``text`` says who wants so, and why."""
        if self.phase in SERVING:
            self.replacement.order_restart(self.slots.of_row(row), text, now_s)

    @handles(control.EpisodesDone, *SERVING)
    def on_episodes_done(self, now_s: float, process: Process, done: control.EpisodesDone) -> None:
        slot = self.slots[process.slot_index]
        slot.needs_recycling = slot.serving is not None
        self.replacement.recycle(now_s)

    @handles(control.HandedOver, *SERVING)
    def on_handed_over(self, now_s: float, process: Process, left: control.HandedOver) -> None:
        slot = self.slots[process.slot_index]
        if slot.successor is not None:
            self.on_snapshot_advanced(self.snapshots.on_left(slot, now_s))
        else:
            self.on_snapshot_advanced(self.snapshots.on_worker_lost(slot.rows[0]))
            self.replacement.on_handed_over(slot, now_s)

    @handles(control.SnapshotTaken, *SERVING)
    def on_snapshot_taken(self, now_s: float, process: Process, taken: control.SnapshotTaken) -> None:
        self.on_snapshot_advanced(self.snapshots.on_taken(self.slots[process.slot_index].rows[0], taken))

    @handles(control.NotRepeated, *SERVING)
    def on_not_repeated(self, now_s: float, process: Process, sent: control.NotRepeated) -> None:
        if self.slots.of(process) is None:
            self.on_snapshot_advanced(self.snapshots.on_restored_ended(process, sent.why))
        else:  # its slot's next process begins elsewhere
            self.snapshots.on_restart_failed(self.slots[process.slot_index], sent.why)
            self.effects.kill(process.number)

    @allowed_in(*LIVE)
    def on_snapshot_born(self, now_s: float, serial: int, private_bytes: int) -> None:
        self.on_snapshot_advanced(self.snapshots.on_born(serial, private_bytes))

    @allowed_in(*LIVE)
    def on_rows_waiting(self, now_s: float, slot: int) -> None:
        """Note that steps were posted to a slot whose process has ended; its rows wait for the next one."""
        left = self.slots[slot]
        if left.loss is not None:
            left.finish_at_s = min(left.finish_at_s, now_s + self.make.faults.restart_wait_s)

    # --- rows ---------------------------------------------------------------------------------------------------------

    @handles(control.RowInfo, *SERVING)
    def on_row_info(self, now_s: float, process: Process, sent: control.RowInfo) -> None:
        if sent.row in self.slots[process.slot_index].rows:
            self.infos.add(sent.row, sent.info, sent.number)

    @allowed_in(*LIVE)
    def on_lost_row_info(self, now_s: float, row: int, info: bytes) -> None:
        """Keep a large info of a row of an ended worker that the hub completed."""
        self.infos.add(row, info)

    @handles(control.InfoTemplate, *SERVING)
    def on_template(self, now_s: float, process: Process, template: control.InfoTemplate) -> None:
        self.infos.on_template(self.slots[process.slot_index], template)

    @handles(control.SetAttrRows, *SERVING)
    def on_attribute_set(self, now_s: float, process: Process, message: control.SetAttrRows) -> None:
        self.requests.on_attribute_set(self.slots[process.slot_index], message)

    @handles(control.RowFailed, *MAKING, then=(Phase.CLOSING,))
    @handles(control.RowFailed, *SERVING, Phase.CLOSING)
    def on_row_failed(self, now_s: float, process: Process, failed: control.RowFailed) -> None:
        slot = self.slots[process.slot_index]
        if self.making:
            self.abandon(failed.failure, now_s)
        elif self.phase is not Phase.CLOSING:
            self._on_env_raised(slot, failed)
        elif failed.failure.code != "factory_failed":  # else the process was still to make its envs
            self.requests.record_failure(failed.failure)

    def _on_env_raised(self, slot: Slot, failed: control.RowFailed) -> None:
        failure = failed.failure
        if slot.loss is not None and failure.code == "factory_failed":
            slot.boot_failure = failure
            return
        row, cause = failure.env_index, "nan" if failed.invalid else "exception"
        env_failure = EnvFailure(cause, failure.message, exception=failure.type, traceback=failure.traceback)
        name = self.replacement.keep_replay_of(slot, row, failed.number, failed.trace, env_failure)
        self._record_failure(replace(failure, replay=name), slot.rows)

    @allowed_in(*SERVING, Phase.BROKEN, Phase.CLOSING)
    def on_lost_row_failed(self, now_s: float, failure: Failure) -> None:
        if self.phase in SERVING:
            self._record_failure(failure, range(self.make.num_envs))

    def _record_failure(self, failure: Failure, rows: Collection[int]) -> None:
        if self.phase is Phase.READY:
            self.infos.record_failure(failure, rows)
        else:
            self.requests.record_failure(failure)

    @handles(control.Faulted, *SERVING, then=(Phase.BROKEN,))
    def on_faulted(self, now_s: float, process: Process, fault: control.Faulted) -> None:
        if broken := self.replacement.on_faulted(self.slots[process.slot_index], fault, now_s):
            self.break_down(broken)

    @handles(control.SharedChanged, *LIVE)
    def on_shared_changed(self, now_s: float, process: Process, changed: control.SharedChanged) -> None:
        self.building.on_shared_changed(changed)

    @handles(control.Closing, *LIVE)
    def on_closing(self, now_s: float, process: Process, sent: control.Closing) -> None:
        self.closing.on_closing(process, sent, now_s)

    # --- time ---------------------------------------------------------------------------------------------------------

    @allowed_in(*LIVE)
    def on_elapsed(
        self,
        now_s: float,
        quiescent: bool,
        progress: Sequence[Progress | None],
        memory: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Do what is due, and supervise the processes: the time of ``next_deadline_s`` has come."""
        # ``progress`` has each slot's progress, None for an idle slot; ``memory`` the bytes of memory of each process,
        # if ``supervision`` measures it now.
        if self.phase in (Phase.BROKEN, Phase.CLOSING):
            self._end_late(progress, now_s)
            return
        replacement = self.replacement
        self.supervision.on_sampled(progress, now_s)
        replacement.finish_steps(now_s)
        idle = self.driver is Driver.CLIENT and quiescent and not self.takeover_pending
        self.supervision.plan_next_sample(self.samples, idle, now_s)
        self.supervision.on_measured(memory, now_s)
        self.quiescent = quiescent
        if self.lane is LaneName.WIRE and quiescent:
            self.take_drive()
        self.advance_takeover(quiescent)
        if self.takeover_pending and now_s >= self.let_go_by_s:
            self.keep_holder()
        self.closing.on_elapsed(progress, now_s)
        self.on_snapshot_advanced(self.snapshots.on_elapsed(now_s))
        if self.make.faults.on_crash == "restore":
            for slot in replacement.to_restart(now_s):
                self.snapshots.restart(slot, now_s)
        self.launcher.start(replacement.to_restart(now_s), now_s)
        if now_s >= self.deadlines.spares_at_s:
            replacement.spares.fill(now_s)
        replacement.on_measured(memory, now_s)
        replacement.recycle(now_s)

    def _end_late(self, progress: Sequence[Progress | None], now_s: float) -> None:
        """Kill processes that do not close in time; once all are killed, CLOSE is answered, though one may not end."""
        waited = self.closing.waits
        self.closing.on_elapsed(progress, now_s)
        if self.phase is Phase.CLOSING and waited and not self.closing.waits:
            self.answer_close()
