"""The instructions of a session's machine, carried out on what the session holds."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from envhub.arena.memory import DRIVER_CLIENT, DRIVER_HUB, FRESH, OP_OUT_OF_BAND, OP_RESET, OP_STEP, REPORT_PENDING
from envhub.protocol import messages
from envhub.protocol.prelude import FRAME_BYTES_MAX
from envhub_server.hub.holdings import Holdings
from envhub_server.hub.inputs import Inputs
from envhub_server.hub.instruction_table import Table, entry
from envhub_server.hub.session_observer import Recipient
from envhub_server.ipc import control
from envhub_server.memory.session_memory import SessionMemory
from envhub_server.memory.stand_ins import ObjectCopies, StandIns
from envhub_server.session import instructions, stimuli


class Executor:
    """Carries out the instructions of one session, but for its replies; ``instructions`` says what each is about."""

    def __init__(self, held: Holdings, inputs: Inputs) -> None:
        self._held, self._inputs = held, inputs

    # --- processes ----------------------------------------------------------------------------------------------------

    def start_processes(self, instruction: instructions.StartProcesses) -> None:
        """Start processes, or report that none can be had."""
        held = self._held
        processes = instruction.processes
        try:
            held.pool.start(processes, instruction.libraries)
        except OSError as error:
            for process in processes:
                worker = held.state.slots.worker(process)
                # Event: A worker process has ended, or could not be started; `why` is the limit for which the hub ended
                # it.
                held.log.warning("worker_exited", worker=worker, how=f"cannot be started: {error}")
            held.report(stimuli.WorkersNotStarted(processes, error.strerror or repr(error)))
        else:
            self._label()

    def assign(self, assigned: instructions.Assign) -> None:
        """Have a spare serve a slot."""
        held = self._held
        self._label()
        # Event: A spare has taken the place of a worker that ended or left.
        held.log.info("spare_used", worker=assigned.slot)

    def tell(self, instruction: instructions.Tell) -> None:
        """Send a message to a process."""
        held = self._held
        message = instruction.message
        given = [held.factories] if isinstance(message, control.Build) and message.factories else []
        held.pool.tell(instruction.process, message, *given)

    def give_arena(self, instruction: instructions.GiveArena) -> None:
        """Hand the arena to a process."""
        held = self._held
        memory = held.memory
        if memory is None:
            return
        process, layout = instruction.process, memory.arena.layout
        recipient = Recipient(process, instruction.slot, held.state.slots[instruction.slot].rows, layout, held.log)
        message, given = instruction.message, dict[str, int]()
        for observer in held.observers:
            message, descriptors = observer.arena_given(recipient, message)
            given |= descriptors
        all_descriptors = control.ArenaDescriptors(
            memory=memory.descriptor,
            hub_bell=-1,  # the one of the process, which its handle has
            client_bell=memory.slot_bells[instruction.slot],
            hub_done_bell=held.done_bell,
            client_done_bell=memory.client_bell,
            **given,
        )
        held.pool.map_arena(process, message, all_descriptors)
        for descriptor in given.values():
            os.close(descriptor)

    def keep_replay(self, wanted: instructions.KeepReplay) -> None:
        """Have the observers keep what the env was asked."""
        held = self._held
        if held.memory is None:
            return
        for observer in held.observers:
            observer.env_failed(wanted, held.state.slots[wanted.slot].rows, held.memory)

    def hand_over(self, instruction: instructions.HandOver) -> None:
        """Give the rows of a slot to its process."""
        held = self._held
        slot, process, message = instruction.slot, instruction.process, instruction.message
        memory, stand_ins = held.memory, held.stand_ins
        assert memory is not None and stand_ins is not None
        objects = stand_ins.objects(slot)
        if slot in stand_ins.losses:
            self._ignore_bell(slot)
            stand_ins.release(slot)
        held.pool.serve(slot, process)
        held.pool.tell(process, replace(message, objects=objects))
        rows, request, done, op, _ = memory.words(slot)
        waiting = set(op[request != done].tolist())
        if OP_OUT_OF_BAND in waiting:
            held.pool.tell(process, control.StepRows(memory.frames.out_of_band_of(rows.tolist())))
        reset = isinstance(instruction.pending, control.ResetRows)
        if instruction.pending is not None and (OP_RESET in waiting or not reset):
            held.pool.tell(process, instruction.pending)

    def report_late(self, instruction: instructions.ReportLate) -> None:
        """Log an env that does not return."""
        held = self._held
        late = instruction.late
        tell = held.log.error if late.expired else held.log.warning
        # Event: An env is slow; as an error at its deadline, at which it counts as hung.
        tell("env_late", env=late.row, at=late.kind, waited_s=round(late.waited_s, 1), limit_s=late.limit_s)
        if late.expired or late.kind == "close":
            held.pool.dump(instruction.process)

    def kill(self, instruction: instructions.Kill) -> None:
        """End a process."""
        self._held.pool.kill(instruction.process)

    # --- the arena ----------------------------------------------------------------------------------------------------

    def make_arena(self, instruction: instructions.MakeArena) -> None:
        """Allocate the arena, or report that it cannot be had."""
        held = self._held
        layout = instruction.layout
        batch = max((layout.batch_bytes(leaf) for leaf in layout.observations), default=0)
        if batch > FRAME_BYTES_MAX:
            text = f"{batch} bytes of observations in a frame of each reply; at most {FRAME_BYTES_MAX} are sent"
            held.report(stimuli.ArenaRefused(text))
            return
        try:
            held.memory = SessionMemory(layout, len(held.state.slots), held.budget)
        except OSError as error:
            held.report(stimuli.ArenaRefused(f"{layout.nbytes()} bytes of shared memory cannot be had: {error}"))
            return
        if held.state.make.lost or held.state.make.fresh:
            held.memory.arena.needs_reset[:] = REPORT_PENDING if held.state.make.lost else FRESH
        copies = ObjectCopies() if instruction.loose else None
        held.stand_ins = StandIns(held.memory, copies, instruction.is_batch)

    def post_reset(self, _: instructions.PostReset) -> None:
        """Post all rows for a reset."""
        held = self._held
        assert held.memory is not None
        held.memory.driver.post(OP_RESET)

    def post_step(self, _: instructions.PostStep) -> None:
        """Post all rows for a step, or report that the actions do not fit."""
        held = self._held
        memory, request, stand_ins = held.memory, held.under_way, held.stand_ins
        assert memory is not None and request is not None and stand_ins is not None
        frames = memory.frames
        if problem := frames.load(request.message.codes, request.frames):
            held.report(stimuli.ActionsRefused(problem))
            return
        memory.driver.post(OP_OUT_OF_BAND if frames.out_of_band else OP_STEP, frames.codes, frames.arrays)
        if frames.out_of_band:
            for slot in held.state.slots:
                if slot.process is not None and slot.index not in stand_ins.losses:
                    held.pool.tell(slot.process.number, control.StepRows(frames.out_of_band_of(slot.rows)))
        else:
            held.pool.ring()
        if stand_ins.losses:
            self._inputs.post_to_stand_ins()

    def post_part(self, _: instructions.PostPart) -> None:
        """Post some rows for a step, or report that the actions do not fit."""
        held = self._held
        memory, request = held.memory, held.under_way
        assert memory is not None and request is not None
        message = request.message
        try:
            rows, arrays = memory.frames.part(message.rows, message.codes, request.frames)
            memory.driver.post_rows(rows, message.codes, arrays)
        except ValueError as error:
            held.report(stimuli.ActionsRefused(f"{error}; no env has moved"))
            return
        held.report(stimuli.PartPosted(len(rows)))
        held.pool.ring_some(np.unique(rows % len(held.state.slots)).tolist())
        self._inputs.post_to_stand_ins()

    def take_part(self, instruction: instructions.TakePart) -> None:
        """Have rows of partial batches reported once they are done."""
        held = self._held
        held.part_rows = instruction.rows
        assert held.memory is not None
        self._inputs.report_part(held.memory)

    def leave_part(self, _: instructions.LeavePart) -> None:
        """Report no rows of a part until the next RECEIVE."""
        self._held.part_rows = 0

    # --- rows without a process ---------------------------------------------------------------------------------------

    def take_rows(self, lost: instructions.TakeRows) -> None:
        """Complete the rows of a slot whose process has ended or left."""
        held = self._held
        if lost.left:
            # Event: A worker was recycled: another one takes its rows over.
            held.log.info("worker_recycled", worker=lost.slot)
        for observer in held.observers if not lost.left else ():
            observer.rows_lost(lost.process, lost.loss.failure.message)
        stand_ins = held.stand_ins
        assert stand_ins is not None
        if lost.slot not in stand_ins.losses:
            self._hear_bell(lost.slot)
        self._inputs.stand_in(stand_ins.take(lost.slot, lost.loss, lost.resetting, lost.left))

    def keep_rows(self, instruction: instructions.KeepRows) -> None:
        """Complete rows unchanged."""
        held = self._held
        assert held.stand_ins is not None
        self._inputs.stand_in(held.stand_ins.keep(instruction.slot))

    def finish_steps(self, instruction: instructions.FinishSteps) -> None:
        """Complete the steps that wait."""
        held = self._held
        assert held.stand_ins is not None
        self._inputs.stand_in(held.stand_ins.finish(instruction.slot, instruction.loss))

    # --- who drives ---------------------------------------------------------------------------------------------------

    def grant(self, _: instructions.Grant) -> None:
        """Give the client the shared lane."""
        held = self._held
        memory, side = held.memory, held.side
        assert memory is not None and side is not None
        held.ticket, held.side = b"", None
        spin_us = held.state.sizing.driver_spin_us
        shared = messages.Shared(memory.arena.layout.info_bytes, len(held.state.slots), spin_us)
        if not held.lane.share(side, shared, [memory.descriptor, memory.client_bell, *memory.slot_bells], self._inputs):
            held.report(stimuli.SideClosed(quiescent=True))

    def refuse_side(self, _: instructions.RefuseSide) -> None:
        """Close the connection to the side socket."""
        self._held.close_side()

    def give_drive(self, _: instructions.GiveDrive) -> None:
        """Have the client drive."""
        held = self._held
        assert held.memory is not None
        held.memory.arena.set_driver(DRIVER_CLIENT)

    def take_drive(self, _: instructions.TakeDrive) -> None:
        """Have the hub drive."""
        held = self._held
        assert held.memory is not None and held.stand_ins is not None
        held.memory.arena.set_driver(DRIVER_HUB)
        held.memory.driver.take_over()
        held.stand_ins.keep_objects()  # which a client that takes over has not seen

    def close_side(self, _: instructions.CloseSide) -> None:
        """Take the shared lane from the client."""
        held = self._held
        held.lane.close()
        held.pool.ring()  # the client may have posted rows and not have rung
        if held.stand_ins is not None:
            self._inputs.post_to_stand_ins()

    def revoke(self, _: instructions.Revoke) -> None:
        """Send the client that drives to ask what became of its session."""
        held = self._held
        assert held.memory is not None
        held.lane.revoke(held.memory.arena)

    def recall(self, _: instructions.Recall) -> None:
        """Have the client that drives ask the hub: the word says so, and the bell wakes a client that waits."""
        held = self._held
        assert held.memory is not None
        held.memory.arena.revoke()
        self._inputs.ring_client()

    def end_recall(self, _: instructions.EndRecall) -> None:
        """Have the client that drives go on."""
        held = self._held
        assert held.memory is not None
        held.memory.arena.restore()

    def transfer(self, _: instructions.Transfer) -> None:
        """Give the session to the client that attaches."""
        self._held.transfer()

    def wind_up(self, _: instructions.WindUp) -> None:
        """Have the client that drives begin no other step."""
        held = self._held
        assert held.memory is not None
        held.memory.arena.wind_up()

    # --- the rest -----------------------------------------------------------------------------------------------------

    def learn(self, learned: instructions.Learn) -> None:
        """Note facts about the envs."""
        held = self._held
        held.services.env_facts.note(held.state.make, learned.facts)

    def warn(self, warning: instructions.Warn) -> None:
        """Log a warning."""
        self._held.log.warning(warning.event, ("session", "worker", "message"), **warning.fields)

    def end(self, _: instructions.End) -> None:
        """Free what the session holds."""
        held = self._held
        held.close_side()
        held.lane.close()
        for slot in held.stand_ins.losses if held.stand_ins is not None else ():
            self._ignore_bell(slot)
        held.services.poller.unregister(held.done_bell)
        os.close(held.done_bell)
        if held.factories >= 0:
            os.close(held.factories)
        for observer in held.observers:
            observer.session_ended()
        if held.memory is not None:
            held.steps = held.memory.steps
            memory, held.memory, held.stand_ins = held.memory, None, None
            self._let_go(memory)

    def _label(self) -> None:
        held = self._held
        for process in held.state.slots.processes:
            held.pool.label(process.number, held.state.slots.worker(process.number))

    def _let_go(self, memory: SessionMemory) -> None:
        """Close memory that is used no more; a view of it, as in a reply that was not read, keeps it mapped."""
        held = self._held
        nbytes, ref = memory.nbytes, memory.arena.memory_ref()
        memory.close()
        del memory.arena, memory.driver, memory.frames
        now_s = held.services.clock.now_s()
        held.services.unread.add(ref, nbytes, held.budget, held.connections, now_s)

    def _hear_bell(self, slot: int) -> None:
        # The bell is never read, since its client could make that block. By edges each ring is reported once.
        held = self._held
        if held.memory is not None:
            held.services.poller.register(held.memory.slot_bells[slot], self._inputs, edges=True)

    def _ignore_bell(self, slot: int) -> None:
        held = self._held
        if held.memory is not None:
            held.services.poller.unregister(held.memory.slot_bells[slot])


EXECUTED: Table[Executor] = dict(
    [
        entry(instructions.StartProcesses, Executor.start_processes),
        entry(instructions.Assign, Executor.assign),
        entry(instructions.Tell, Executor.tell),
        entry(instructions.GiveArena, Executor.give_arena),
        entry(instructions.KeepReplay, Executor.keep_replay),
        entry(instructions.HandOver, Executor.hand_over),
        entry(instructions.ReportLate, Executor.report_late),
        entry(instructions.Kill, Executor.kill),
        entry(instructions.MakeArena, Executor.make_arena),
        entry(instructions.PostReset, Executor.post_reset),
        entry(instructions.PostStep, Executor.post_step),
        entry(instructions.PostPart, Executor.post_part),
        entry(instructions.TakePart, Executor.take_part),
        entry(instructions.LeavePart, Executor.leave_part),
        entry(instructions.TakeRows, Executor.take_rows),
        entry(instructions.KeepRows, Executor.keep_rows),
        entry(instructions.FinishSteps, Executor.finish_steps),
        entry(instructions.Grant, Executor.grant),
        entry(instructions.RefuseSide, Executor.refuse_side),
        entry(instructions.GiveDrive, Executor.give_drive),
        entry(instructions.TakeDrive, Executor.take_drive),
        entry(instructions.CloseSide, Executor.close_side),
        entry(instructions.Revoke, Executor.revoke),
        entry(instructions.Recall, Executor.recall),
        entry(instructions.EndRecall, Executor.end_recall),
        entry(instructions.Transfer, Executor.transfer),
        entry(instructions.WindUp, Executor.wind_up),
        entry(instructions.Learn, Executor.learn),
        entry(instructions.Warn, Executor.warn),
        entry(instructions.End, Executor.end),
    ]
)
