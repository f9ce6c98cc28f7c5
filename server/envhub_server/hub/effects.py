"""The effects of a session's machine on what the session holds."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from envhub.arena.layout import Layout
from envhub.arena.memory import DRIVER_CLIENT, DRIVER_HUB, FRESH, OP_OUT_OF_BAND, OP_RESET, OP_STEP
from envhub.protocol import messages
from envhub.protocol.prelude import FRAME_BYTES_MAX
from envhub_server.catalog.registry import EnvFacts
from envhub_server.hub.replies import SessionReplies
from envhub_server.hub.session_observer import Recipient
from envhub_server.ipc import control
from envhub_server.memory.session_memory import SessionMemory
from envhub_server.memory.stand_ins import ObjectCopies, StandIns
from envhub_server.session.effects import ReplayOrder
from envhub_server.session.failure_text import WorkerLoss
from envhub_server.session.hang_detector import Late
from envhub_server.session.machine import SessionMachine


class SessionEffects(SessionReplies):
    """The ``Effects`` of one session, which says what each method does."""

    # --- processes ----------------------------------------------------------------------------------------------------

    def start_processes(self, processes: tuple[int, ...], spare: bool = False, libraries: tuple[str, ...] = ()) -> None:
        try:
            self.pool.start(processes, libraries)
        except OSError as error:
            for process in processes:
                worker = self.state.slots.worker(process)
                # Event: A worker process has ended, or could not be started; `why` is the limit for which the hub ended
                # it.
                self.log.warning("worker_exited", worker=worker, how=f"cannot be started: {error}")
            self.report(SessionMachine.on_not_started, processes, error.strerror or repr(error))
        else:
            self._label()

    def assign(self, slot: int, process: int) -> None:
        self._label()
        # Event: A spare has taken the place of a worker that ended or left.
        self.log.info("spare_used", worker=slot)

    def tell(self, process: int, message: Any) -> None:
        given = [self.factories] if isinstance(message, control.Build) and message.factories else []
        self.pool.tell(process, message, *given)

    def give_arena(self, process: int, slot: int, message: control.MapArena) -> None:
        memory = self.memory
        if memory is None:
            return
        recipient = Recipient(process, slot, self.state.slots[slot].rows, memory.arena.layout, self.log)
        given = dict[str, int]()
        for observer in self.observers:
            message, descriptors = observer.arena_given(recipient, message)
            given |= descriptors
        all_descriptors = control.ArenaDescriptors(
            memory=memory.descriptor,
            hub_bell=-1,  # the one of the process, which its handle has
            client_bell=memory.slot_bells[slot],
            hub_done_bell=self.done_bell,
            client_done_bell=memory.client_bell,
            **given,
        )
        self.pool.map_arena(process, message, all_descriptors)
        for descriptor in given.values():
            os.close(descriptor)

    def keep_replay(self, order: ReplayOrder) -> None:
        if self.memory is None:
            return
        for observer in self.observers:
            observer.env_failed(order, self.state.slots[order.slot].rows, self.memory)

    def hand_over(self, slot: int, process: int, message: control.Serve, pending: Any = None) -> None:
        memory, stand_ins = self.memory, self.stand_ins
        assert memory is not None and stand_ins is not None
        objects = stand_ins.objects(slot)
        if slot in stand_ins.losses:
            self._ignore_bell(slot)
            stand_ins.release(slot)
        self.pool.serve(slot, process)
        self.pool.tell(process, replace(message, objects=objects))
        rows, request, done, op, _ = memory.words(slot)
        waiting = set(op[request != done].tolist())
        if OP_OUT_OF_BAND in waiting:
            self.pool.tell(process, control.StepRows(memory.frames.out_of_band_of(rows.tolist())))
        reset = isinstance(pending, control.ResetRows)
        if pending is not None and (OP_RESET in waiting or not reset):
            self.pool.tell(process, pending)

    def report_late(self, process: int, late: Late) -> None:
        tell = self.log.error if late.expired else self.log.warning
        # Event: An env is slow; as an error at its deadline, at which it counts as hung.
        tell("env_late", env=late.row, at=late.kind, waited_s=round(late.waited_s, 1), limit_s=late.limit_s)
        if late.expired or late.kind == "close":
            self.pool.dump(process)

    def kill(self, process: int) -> None:
        self.pool.kill(process)

    # --- the arena ----------------------------------------------------------------------------------------------------

    def make_arena(self, layout: Layout, has_object_leaves: bool, is_batch: bool) -> None:
        batch = max((layout.batch_bytes(leaf) for leaf in layout.observations), default=0)
        if batch > FRAME_BYTES_MAX:
            text = f"{batch} bytes of observations in a frame of each reply; at most {FRAME_BYTES_MAX} are sent"
            self.report(SessionMachine.on_arena_refused, text)
            return
        try:
            self.memory = SessionMemory(layout, len(self.state.slots), self.budget)
        except OSError as error:
            text = f"{layout.nbytes()} bytes of shared memory cannot be had: {error}"
            self.report(SessionMachine.on_arena_refused, text)
            return
        if self.state.make.fresh:
            self.memory.arena.needs_reset[:] = FRESH
        self.stand_ins = StandIns(self.memory, ObjectCopies() if has_object_leaves else None, is_batch)

    def post_reset(self) -> None:
        assert self.memory is not None
        self.memory.driver.post(OP_RESET)

    def post_step(self) -> None:
        memory, request, stand_ins = self.memory, self.under_way, self.stand_ins
        assert memory is not None and request is not None and stand_ins is not None
        frames = memory.frames
        if problem := frames.load(request.message.codes, request.frames):
            self.report(SessionMachine.on_actions_refused, problem)
            return
        memory.driver.post(OP_OUT_OF_BAND if frames.out_of_band else OP_STEP, frames.codes, frames.arrays)
        if frames.out_of_band:
            for slot in self.state.slots:
                if slot.process is not None and slot.index not in stand_ins.losses:
                    self.pool.tell(slot.process.number, control.StepRows(frames.out_of_band_of(slot.rows)))
        else:
            self.pool.ring()
        if stand_ins.losses:
            self.post_to_stand_ins()

    def post_part(self) -> None:
        memory, request = self.memory, self.under_way
        assert memory is not None and request is not None
        message = request.message
        try:
            rows, arrays = memory.frames.part(message.rows, message.codes, request.frames)
            memory.driver.post_rows(rows, message.codes, arrays)
        except ValueError as error:
            self.report(SessionMachine.on_actions_refused, f"{error}; no env has moved")
            return
        self.report(SessionMachine.on_part_posted, len(rows))
        self.pool.ring_some(np.unique(rows % len(self.state.slots)).tolist())
        self.post_to_stand_ins()

    def take_part(self, rows: int) -> None:
        self.part_rows = rows
        assert self.memory is not None
        self.report_part(self.memory)

    def leave_part(self) -> None:
        self.part_rows = 0

    # --- rows without a process ---------------------------------------------------------------------------------------

    def take_rows(
        self, slot: int, process: int, loss: WorkerLoss, resetting: tuple[int, ...] | None, left: bool = False
    ) -> None:
        if left:
            # Event: A worker was recycled: another one takes its rows over.
            self.log.info("worker_recycled", worker=slot)
        for observer in self.observers if not left else ():
            observer.rows_lost(process, loss.failure.message)
        stand_ins = self.stand_ins
        assert stand_ins is not None
        if slot not in stand_ins.losses:
            self._hear_bell(slot)
        self.stand_in(stand_ins.take(slot, loss, resetting, left))

    def keep_rows(self, slot: int) -> None:
        assert self.stand_ins is not None
        self.stand_in(self.stand_ins.keep(slot))

    def finish_steps(self, slot: int, loss: WorkerLoss) -> None:
        assert self.stand_ins is not None
        self.stand_in(self.stand_ins.finish(slot, loss))

    # --- who drives ---------------------------------------------------------------------------------------------------

    def grant(self) -> None:
        memory, side = self.memory, self.side
        assert memory is not None and side is not None
        self.ticket, self.side = b"", None
        spin_us = self.state.sizing.driver_spin_us
        shared = messages.Shared(memory.arena.layout.info_bytes, len(self.state.slots), spin_us)
        if not self.lane.share(side, shared, [memory.descriptor, memory.client_bell, *memory.slot_bells], self):
            self.report(SessionMachine.on_side_closed, True)

    def give_drive(self) -> None:
        assert self.memory is not None
        self.memory.arena.set_driver(DRIVER_CLIENT)

    def take_drive(self) -> None:
        assert self.memory is not None and self.stand_ins is not None
        self.memory.arena.set_driver(DRIVER_HUB)
        self.memory.driver.take_over()
        self.stand_ins.keep_objects()  # which a client that takes over has not seen

    def close_side(self) -> None:
        self.lane.close()
        self.pool.ring()  # the client may have posted rows and not have rung
        if self.stand_ins is not None:
            self.post_to_stand_ins()

    def revoke(self) -> None:
        assert self.memory is not None
        self.lane.revoke(self.memory.arena)

    def recall(self) -> None:
        assert self.memory is not None
        self.memory.arena.revoke()
        self.ring_client()

    def end_recall(self) -> None:
        assert self.memory is not None
        self.memory.arena.restore()

    def wind_up(self) -> None:
        assert self.memory is not None
        self.memory.arena.wind_up()

    # --- the rest -----------------------------------------------------------------------------------------------------

    def learn(self, facts: EnvFacts) -> None:
        self.services.env_facts.note(self.state.make, facts)

    def warn(self, event: str, fields: dict[str, Any]) -> None:
        self.log.warning(event, ("session", "worker", "message"), **fields)

    def end(self) -> None:
        if self.delays(self.end):
            return
        self.refuse_side()
        self.lane.close()
        for slot in self.stand_ins.losses if self.stand_ins is not None else ():
            self._ignore_bell(slot)
        self.services.poller.unregister(self.done_bell)
        os.close(self.done_bell)
        if self.factories >= 0:
            os.close(self.factories)
        for observer in self.observers:
            observer.session_ended()
        if self.memory is not None:
            self._steps = self.memory.steps
            memory, self.memory, self.stand_ins = self.memory, None, None
            self._let_go(memory)

    def _label(self) -> None:
        for process in self.state.slots.processes:
            self.pool.label(process.number, self.state.slots.worker(process.number))

    def _let_go(self, memory: SessionMemory) -> None:
        """Close memory that is used no more; a view of it, as in a reply that was not read, keeps it mapped."""
        nbytes, ref = memory.nbytes, memory.arena.memory_ref()
        memory.close()
        del memory.arena, memory.driver, memory.frames
        now_s = self.services.clock.now_s()
        self.services.unread.add(ref, nbytes, self.budget, self.connections, now_s)

    def _hear_bell(self, slot: int) -> None:
        # The bell is never read, since its client could make that block. By edges each ring is reported once.
        if self.memory is not None:
            self.services.poller.register(self.memory.slot_bells[slot], self, edges=True)

    def _ignore_bell(self, slot: int) -> None:
        if self.memory is not None:
            self.services.poller.unregister(self.memory.slot_bells[slot])
