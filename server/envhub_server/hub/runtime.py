"""One session of a hub: its state machine, what tells the machine, and what the machine has the hub do.

Everything is decided by the state machine, by calls of its effects. What comes of one is put into the hub's queue of
events; so the state machine is never re-entered, and a session's events are handled in their order.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import replace
from typing import Any

import numpy as np

from envhub.arena.layout import Layout
from envhub.arena.memory import DRIVER_CLIENT, DRIVER_HUB, FRESH, OP_OUT_OF_BAND, OP_RESET, OP_STEP
from envhub.errors import shortened
from envhub.protocol import messages
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure, Op
from envhub.protocol.prelude import FRAME_BYTES_MAX
from envhub.values import codec
from envhub_server.catalog.registry import EnvFacts
from envhub_server.hub.resources import COMPRESSED, ROWS_STOOD_IN, STEP_REQUESTED, Attaching, SessionResources
from envhub_server.ipc import control
from envhub_server.ipc.process_marks import memory_bytes
from envhub_server.memory.session_memory import SessionMemory, process_of
from envhub_server.memory.stand_ins import ObjectCopies, StandIns
from envhub_server.processes.worker_handle import WorkerExited, WorkerSaid, WorkerStarted
from envhub_server.session.effects import ReplayOrder
from envhub_server.session.machine import SessionMachine
from envhub_server.session.slots import Late, WorkerLoss
from envhub_server.session.state import Driver

_OVERTAKEN = Failure("session_lost", "session", "another client took the session over")
# From these on a client may see no more of what the rows have shown: its step failed, or it was interrupted.
_KEEPING = (SessionMachine.on_rows_done, SessionMachine.on_request)
# What a client asks for while it drives; what its workers have said by then belongs to the answer.
_SIDE_REQUESTS = (messages.Collect, messages.TemplatesRequest)


class SessionRuntime(SessionResources):
    """One session with everything it holds, and the ``Effects`` of its machine, which says what each method does."""

    deadline_s = math.inf  # when the hub calls ``elapse``

    # --- what the machine is told -------------------------------------------------------------------------------------

    def start(self, request: Incoming) -> None:
        self.under_way = request
        self.report(SessionMachine.on_made)

    def attach(self, attaching: Attaching) -> None:
        """Report that another client is to get the session; one that waits for it already gets it no more."""
        waits = self.attaching is not None
        if waits:
            self.refuse_attach(_OVERTAKEN)
        self.attaching = attaching
        # While a reply is compressed, the event of an earlier request still waits; it is answered in this one's place.
        if not (waits and self.compressing is not None):
            self.report(SessionMachine.on_attached, self.quiescent)

    def request(self, request: Incoming) -> None:
        """Report the client's next request, after what workers said that belongs to its answer."""
        self.arrived = request
        if request.op is Op.STEP and self.state.ownership.driver is Driver.HUB:
            self.services.events.append((self.number, STEP_REQUESTED))
            return
        drives = self.state.ownership.driver is Driver.CLIENT
        if self.stand_ins is not None and (drives or isinstance(request.message, _SIDE_REQUESTS)):
            self.read_workers()
        self.report(SessionMachine.on_request, request.message, self.quiescent)

    def connect_side(self, side: socket.socket) -> None:
        self.refuse_side()
        self.side = side
        self.report(SessionMachine.on_side_connected, self.quiescent, process_of(side))

    def elapse(self) -> None:
        """Report that the time of the next deadline has come, with what the workers are at."""
        try:
            self._elapse()
        except Exception as error:
            self.broke(error)

    def _elapse(self) -> None:
        memory = self.memory
        slots = range(len(self.state.slots))
        progress = tuple(None if memory is None else memory.progress(slot) for slot in slots)
        if self.stand_ins is not None:
            self.post_to_stand_ins()  # a client that ended may have posted rows and not have rung
        self.on_bell()  # a worker that is stopped, or lost its bell, may not have rung
        used = self._memory_used() if self.state.supervision.measures(self.services.clock.now_s()) else {}
        self.report(SessionMachine.on_elapsed, self.quiescent, progress, used)

    def _memory_used(self) -> dict[int, int]:
        pids = {number: worker.pid for number, worker in self.workers.items() if worker.pid is not None}
        orphans = self.services.supervisor.orphans()
        return {number: memory_bytes(pid, *orphans.get(pid, ())) for number, pid in pids.items()}

    # --- handling -----------------------------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        """Tell the state machine what has happened; while a reply is compressed, it is told nothing."""
        if self.compressing is not None:
            self._keep(event)
            return
        if not isinstance(event, tuple):
            self._handle_other(event)
            return
        method, facts = event
        if method is SessionMachine.on_request:
            self.under_way = request = self.arrived
            heir = self.attaching and self.attaching.request.token
            if heir and request is not None and request.token == heir != self.token:
                self.transfer()  # for a CLOSE of the client that attaches, which does not wait for its answer
        stand_ins = self.stand_ins
        if stand_ins is not None and stand_ins.copies is not None and method in _KEEPING:
            stand_ins.keep_objects()
        method(self.state, self.services.clock.now_s(), *facts)

    def _keep(self, event: Any) -> None:
        """Keep an event until the reply that is compressed is sent; or send it, and go on with those that were kept."""
        if event is COMPRESSED:
            self.send_compressed()
        else:
            assert self.compressing is not None
            self.compressing.events.append(event)

    def _handle_other(self, event: Any) -> None:
        if event is ROWS_STOOD_IN:
            self.on_bell()
        elif isinstance(event, WorkerSaid):
            self.handle((SessionMachine.on_said, (self._hear(event),)))
        elif isinstance(event, WorkerStarted):
            # Event: A worker process runs.
            self.log.info("worker_started", worker=self.state.slots.worker(event.process), pid=event.pid)
        else:
            self._on_exited(event)

    def _on_exited(self, exited: WorkerExited) -> None:
        state, number = self.state, exited.process
        ended = self.workers.pop(number, None)
        self.serving = {slot: worker for slot, worker in self.serving.items() if worker is not ended}
        expected, reason = state.expects_end(number), state.supervision.reason(number)
        log = self.log.info if expected else self.log.warning
        why = {"why": reason} if reason else {}
        log("worker_exited", worker=state.slots.worker(number), how=exited.cause.how, **why)
        self.handle((SessionMachine.on_exited, (exited,)))
        if self.replays is not None:
            self.replays.process_ended(number)

    def discard(self) -> None:
        """Free everything, though the state machine cannot say so any more."""
        for worker in [*self.workers.values()]:
            worker.kill()
        self.state.discard()
        self.compressing = None
        self.end()

    # --- messages of processes ----------------------------------------------------------------------------------------

    def _hear(self, said: WorkerSaid) -> WorkerSaid:
        """Log and note what a worker said; returns it with what the arena knows of it."""
        match said.message:
            case control.Suspicious(row, what):
                # Event: An env does what it should not; it goes on.
                self.log.warning("env_suspicious", env=row, why=what)
            case control.Faulted(row, what):
                # Event: An env raised, or gave what is invalid: it is built again in its worker.
                self.log.warning("env_rebuilt", once_per=("session",), env=row, why=shortened(what, 200))
            case control.Built() as built if self.replays is not None:
                self.replays.worker_built(said.process, built)
            case control.RowInfo(row=row) as info if self.memory is not None and self.stand_ins is not None:
                info = self._limited(info, self.memory.arena.layout)
                said = replace(said, message=info, current=self._is_current(said.process, row, info.number))
                if said.current:
                    self.stand_ins.note(info)
                    self.memory.grow(row, len(info.info), self.budget)
            case control.RowFailed(failure=Failure(env_index=row)) as failed if self.memory is not None:
                said = replace(said, current=self._is_current(said.process, row, failed.number))
        return said

    def _is_current(self, number: int, row: int | None, request: int) -> bool:
        process, memory = self.state.slots.process(number), self.memory
        return process is not None and memory is not None and memory.is_current(process.place, row, request)

    def _limited(self, info: control.RowInfo, layout: Layout) -> control.RowInfo:
        """The info, or what stands for one that no honest worker of a public hub sends; objects have no fixed size."""
        has_object_leaves = self.stand_ins is None or self.stand_ins.copies is not None
        bytes_max = self.state.launcher.rules.info_bytes_max
        if (
            self.state.make.program_environment is not None
            or has_object_leaves
            or len(info.info) <= bytes_max + layout.row_bytes()
        ):
            return info
        # Event: An info of an env was larger than allowed, and was replaced.
        self.log.warning("info_dropped", env=info.row, info_bytes=len(info.info), info_bytes_max=bytes_max)
        return replace(info, info=codec.encode({control.INFO_DROPPED: True}))

    # --- processes ----------------------------------------------------------------------------------------------------

    def start_processes(self, processes: tuple[int, ...], spare: bool = False, libraries: tuple[str, ...] = ()) -> None:
        try:
            started = self.services.supervisor.start(self.number, processes, self.interpreter, self.environ, libraries)
        except OSError as error:
            for process in processes:
                worker = self.state.slots.worker(process)
                # Event: A worker process has ended, or could not be started; `why` is the limit for which the hub ended
                # it.
                self.log.warning("worker_exited", worker=worker, how=f"cannot be started: {error}")
            self.report(SessionMachine.on_not_started, processes, error.strerror or repr(error))
        else:
            self.workers.update(zip(processes, started, strict=True))
            self._label()

    def assign(self, slot: int, process: int) -> None:
        self._label()
        # Event: A spare has taken the place of a worker that ended or left.
        self.log.info("spare_used", worker=slot)

    def tell(self, process: int, message: Any) -> None:
        given = [self.factories] if isinstance(message, control.Build) and message.factories else []
        if process in self.workers:
            self.workers[process].send(message, *given)

    def give_arena(self, process: int, slot: int, message: control.MapArena) -> None:
        memory = self.memory
        if memory is None:
            return
        given = dict[str, int]()
        if (replays := self.replays) is not None:
            actions = memory.arena.layout.actions
            trace = replays.begin_trace(process, self.state.slots[slot], actions, self.log)
            if trace is not None:
                message, given = replace(message, trace_bytes_max=replays.trace_bytes_max), {"trace": trace}
        all_descriptors = control.ArenaDescriptors(
            memory=memory.descriptor,
            hub_bell=-1,  # the one of the process, which its handle has
            client_bell=memory.slot_bells[slot],
            hub_done_bell=self.done_bell,
            client_done_bell=memory.client_bell,
            **given,
        )
        if process in self.workers:
            self.workers[process].map_arena(message, all_descriptors)
        for descriptor in given.values():
            os.close(descriptor)

    def keep_replay(self, order: ReplayOrder) -> None:
        if self.replays is not None and self.memory is not None:
            self.replays.env_failed(order, self.state.slots[order.slot].rows, self.memory)

    def hand_over(self, slot: int, process: int, message: control.Serve, pending: Any = None) -> None:
        memory, stand_ins = self.memory, self.stand_ins
        assert memory is not None and stand_ins is not None
        objects = stand_ins.objects(slot)
        if slot in stand_ins.losses:
            self.services.poller.unregister(memory.slot_bells[slot])
            stand_ins.losses.pop(slot)
        if process in self.workers:
            self.serving[slot] = self.workers[process]
        self.tell(process, replace(message, objects=objects))
        rows, request, done, op, _ = memory.words(slot)
        waiting = set(op[request != done].tolist())
        if OP_OUT_OF_BAND in waiting:
            self.tell(process, control.StepRows(memory.frames.out_of_band_of(rows.tolist())))
        reset = isinstance(pending, control.ResetRows)
        if pending is not None and (OP_RESET in waiting or not reset):
            self.tell(process, pending)

    def report_late(self, process: int, late: Late) -> None:
        tell = self.log.error if late.expired else self.log.warning
        # Event: An env is slow; as an error at its deadline, at which it counts as hung.
        tell("env_late", env=late.row, at=late.kind, waited_s=round(late.waited_s, 1), limit_s=late.limit_s)
        if (late.expired or late.kind == "close") and process in self.workers:
            self.workers[process].dump_stacks()

    def kill(self, process: int) -> None:
        if process in self.workers:
            self.workers[process].kill()

    # --- the arena ----------------------------------------------------------------------------------------------------

    def make_arena(self, layout: Layout, has_object_leaves: bool, is_batch: bool) -> None:
        batch = max((layout.rows * leaf.nbytes for leaf in layout.observations), default=0)
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
                    self.tell(slot.process.number, control.StepRows(frames.out_of_band_of(slot.rows)))
        else:
            self.ring(self.serving.values())
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
        slots = np.unique(rows % len(self.state.slots)).tolist()
        self.ring(filter(None, map(self.serving.get, slots)))
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
        stand_ins = self.stand_ins
        assert stand_ins is not None
        if slot not in stand_ins.losses:
            # The bell is never read, since its client could make that block. By edges each ring is reported once.
            self.services.poller.register(stand_ins.memory.slot_bells[slot], self, edges=True)
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
        self.ring(self.serving.values())  # the client may have posted rows and not have rung
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
        if (stand_ins := self.stand_ins) is not None:
            for slot in stand_ins.losses:
                self.services.poller.unregister(stand_ins.memory.slot_bells[slot])
        self.services.poller.unregister(self.done_bell)
        os.close(self.done_bell)
        if self.factories >= 0:
            os.close(self.factories)
        if self.memory is not None:
            self._steps = self.memory.steps
            memory, self.memory, self.stand_ins = self.memory, None, None
            # A view of it, as in a reply that was not read, keeps it mapped.
            nbytes, ref = memory.nbytes, memory.arena.memory_ref()
            memory.close()
            del memory.arena, memory.driver, memory.frames
            now_s = self.services.clock.now_s()
            self.services.unread.add(ref, nbytes, self.budget, self.connections, now_s)

    def _label(self) -> None:
        for process in self.state.slots.processes:
            if worker := self.workers.get(process.number):
                worker.label.update(session=self.token.hex()[:8], worker=self.state.slots.worker(process.number))
