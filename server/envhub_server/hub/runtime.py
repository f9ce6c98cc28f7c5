"""One session of a hub: its state machine, what tells the machine, and what the machine has the hub do.

Everything is decided by the state machine, by calls of its effects. What comes of one is put into the hub's queue of
events; so the state machine is never re-entered, and a session's events are handled in their order.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from envhub.arena.layout import Layout
from envhub.arena.memory import (
    CALLS,
    DRIVER_CLIENT,
    DRIVER_HUB,
    FRESH,
    OP_CALL,
    OP_OUT_OF_BAND,
    OP_RESET,
    OP_SET_ATTR,
    OP_STEP,
    Arena,
)
from envhub.env_failure import EnvFailure, reseeded
from envhub.errors import hide_folders_in, shortened
from envhub.protocol import messages
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure, Op
from envhub.protocol.prelude import FRAME_BYTES_MAX, Frame
from envhub.values import codec
from envhub_server.hub.biography import CLOSED, KILLED, TEXT_CHARS_MAX, Ending, in_one_line, latencies
from envhub_server.hub.resources import COMPRESSED, LOST_ROWS_COMPLETED, STEP_REQUESTED, Attaching, SessionResources
from envhub_server.ipc import control
from envhub_server.ipc.process_marks import memory_bytes, private_bytes
from envhub_server.memory.lost_rows import LostWorkerRows, ObjectCopies
from envhub_server.memory.session_memory import SessionMemory
from envhub_server.network.connections import peer_of
from envhub_server.processes.worker_handle import (
    SessionZygote,
    SnapshotProcess,
    WorkerExited,
    WorkerMessage,
    WorkerStarted,
)
from envhub_server.session.machine import SessionMachine
from envhub_server.session.slots import Late, WorkerLoss
from envhub_server.session.state import Driver

SNAPSHOT_MEASURE_S = 0.1  # between two snapshots whose memory is read
_OVERTAKEN = Failure("session_lost", "session", "another client took the session over")
# From these on a client may see no more of what the rows have shown: its step failed, or it was interrupted.
_KEEPING = (SessionMachine.on_rows_done, SessionMachine.on_request)
# What a client asks for while it drives; what its workers have sent by then belongs to the answer.
_SIDE_REQUESTS = (messages.Collect, messages.TemplatesRequest)


class SessionRuntime(SessionResources):
    """One session with everything it holds, and the ``Effects`` of its machine, which says what each method does."""

    deadline_s = math.inf  # when the hub calls ``elapse``
    on_drawn: Callable[[Any, control.Drawn], None] = staticmethod(lambda runtime, drawn: None)  # takes frames

    # --- what the machine is told -------------------------------------------------------------------------------------

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
        """Report the client's next request, after what workers sent that belongs to its answer."""
        self.arrived.append(request)
        if request.op is Op.STEP and self.state.driver is Driver.HUB:
            self.services.events.append((self.number, STEP_REQUESTED))
            return
        if request.op is Op.CLOSE:
            if self.state.abandoned is not None:
                self.life.end(self.ended)  # which its client answers by CLOSE
            self.life.end(self._ending_by_close(request))
        drives = self.state.driver is Driver.CLIENT
        if self.lost_rows is not None and (drives or isinstance(request.message, _SIDE_REQUESTS)):
            self.read_workers()
        self.report(SessionMachine.on_request, request.message, self.quiescent)

    def _ending_by_close(self, request: Incoming) -> Ending:
        by = self.attaching.taker if self.attaching and request.token != self.token else self.life.taken_by
        how = KILLED if request.message.terminate else CLOSED
        if by:
            return Ending(by, "it took the session over to end it", how)
        return Ending("client", in_one_line(request.message.why) or "its client closed it", how)

    def connect_side(self, side: socket.socket) -> None:
        self.refuse_side()
        self.side = side
        self.report(SessionMachine.on_side_connected, self.quiescent, peer_of(side)[0])

    def elapse(self) -> None:
        """Report that the time of the next deadline has come, with what the workers are at."""
        try:
            memory = self.memory
            progress = tuple(None if memory is None else memory.progress(slot.index) for slot in self.state.slots)
            if self.lost_rows is not None:
                self.complete_posted_rows()  # a client that ended may have posted rows and not have rung
            self.on_bell()  # a worker that is stopped, or lost its bell, may not have rung
            if memory is not None:
                # Forget infos that workers have sent once their rows go on: a frame takes much memory, and comes once.
                infos, request = self.state.infos, memory.arena.request
                for row in [row for row, number in infos.numbers.items() if request[row] != number]:
                    infos.take(row)
            used = dict[int, int]()
            if self.state.supervision.measures(self.services.loop.clock.now_s()):
                pids = {number: worker.pid for number, worker in self.workers.items() if worker.pid is not None}
                orphans = self.services.supervisor.orphans()
                used = {number: memory_bytes(pid, *orphans.get(pid, ())) for number, pid in pids.items()}
            self.report(SessionMachine.on_elapsed, self.quiescent, progress, used)
        except Exception as error:
            self.broke(error)

    # --- handling -----------------------------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        """Tell the state machine what has happened; while a reply is compressed, it is told nothing."""
        if event is COMPRESSED:
            self.send_compressed()
            return
        if self.compressing is not None:
            self.compressing.events.append(event)
            return
        if not isinstance(event, tuple):
            self._handle_other(event)
            return
        method, facts = event
        if method is SessionMachine.on_request:
            self.under_way = request = self.arrived.popleft()
            heir = self.attaching and self.attaching.request.token
            if heir and request.token == heir != self.token:
                self.transfer()  # for a CLOSE of the client that attaches, which does not wait for its answer
        elif method is SessionMachine.on_part_done:
            self.part_rows, self.part_reported = 0, False
        lost_rows = self.lost_rows
        if lost_rows is not None and lost_rows.copies is not None and method in _KEEPING:
            lost_rows.keep_objects()
        method(self.state, self.services.loop.clock.now_s(), *facts)

    def _handle_other(self, event: Any) -> None:
        if event is LOST_ROWS_COMPLETED:
            self.on_bell()
        elif isinstance(event, WorkerMessage) and isinstance(event.message, control.Drawn):
            self.on_drawn(self, event.message)
        elif isinstance(event, WorkerMessage) and isinstance(event.message, control.Slow):
            self.services.slow.on_slow(self, event.process, event.message)
        elif isinstance(event, WorkerMessage) and isinstance(event.message, control.Suspicious):
            # Event: An env does what it should not; it goes on.
            self.log.warning("env_suspicious", env=event.message.row, why=event.message.what)
        elif isinstance(event, WorkerMessage):
            self.handle((SessionMachine.on_message, (self._log_worker_message(event),)))
        elif isinstance(event, WorkerExited) and event.process < 0:
            self.report(SessionMachine.on_exited, event)
        elif event.process < 0:
            if (snapshot := self.snapshots.get(-event.process)) is not None:
                self.report(SessionMachine.on_snapshot_born, -event.process, snapshot.private_bytes)
                self._measure_a_snapshot()
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
        worker = state.slots.worker(number)
        log("worker_exited", worker=worker, how=exited.cause.how, **why)
        self.services.slow.on_exited(self, number)
        if not expected:
            self._note_restart(worker, self._row_of(number), reason or exited.cause.how)
        self.handle((SessionMachine.on_exited, (exited,)))
        if self.replays is not None:
            self.replays.process_ended(number)

    def _row_of(self, number: int) -> int | None:
        """The env that a process was at."""
        process, memory = self.state.slots.process(number), self.memory
        if process is None or memory is None or self.state.slots.of(process) is None:
            return None
        at = memory.progress(process.slot_index)
        late = process.killed_for
        return late.row if isinstance(late, Late) else at.row if at.kind else None

    def _note_restart(self, worker: int, row: int | None, why: str) -> None:
        why = hide_folders_in(why) if self.state.launcher.rules.hide_folders else why
        self.life.reasons.append((self.services.loop.clock.now_s(), worker, row, shortened(why, TEXT_CHARS_MAX)))

    def discard(self) -> None:
        """Free everything, though the state machine cannot say so any more."""
        for worker in [*self.workers.values()]:
            worker.kill()
        self.state.discard()
        self.compressing = None
        self.end()

    # --- messages of processes ----------------------------------------------------------------------------------------

    def _log_worker_message(self, sent: WorkerMessage) -> WorkerMessage:
        """Log and note what a worker sent; returns it with what the arena knows of it."""
        match sent.message:
            case control.Faulted(row, what):
                # Event: An env raised, or gave what is invalid: it is built again in its worker.
                self.log.warning("env_rebuilt", once_per=("session",), env=row, why=shortened(what, TEXT_CHARS_MAX))
                self._note_restart(self.state.slots.worker(sent.process), row, what)
            case control.Built() as built if self.replays is not None:
                self.replays.worker_built(sent.process, built)
            case control.RowInfo(row=row) as info if self.memory is not None and self.lost_rows is not None:
                sent = replace(sent, current=self._is_current(sent.process, row, info.number))
                if sent.current:
                    info = self._limited(info, self.memory.arena)
                    sent = replace(sent, message=info)
                    self.lost_rows.on_row_info(info)
                    self.memory.grow(row, len(info.info), self.budget)
            case control.InfoTemplate(nbytes=nbytes) if self.memory is not None:
                process = self.state.slots.process(sent.process)
                for row in [] if process is None else self.memory.rows(process.slot_index).tolist():
                    self.memory.grow(row, nbytes, self.budget)
            case control.RowFailed(failure=Failure(env_index=row)) as failed if self.memory is not None:
                sent = replace(sent, current=self._is_current(sent.process, row, failed.number))
        return sent

    def _is_current(self, number: int, row: int | None, request: int) -> bool:
        process, memory = self.state.slots.process(number), self.memory
        return process is not None and memory is not None and memory.is_current(process.slot_index, row, request)

    def _limited(self, info: control.RowInfo, arena: Arena) -> control.RowInfo:
        """The info, or what stands for one that no honest worker of a public hub sends; objects have no fixed size.

        A result of a call may be as large as a message of a worker.
        """
        has_object_leaves = self.lost_rows is None or self.lost_rows.copies is not None
        bytes_max = self.state.launcher.rules.info_bytes_max
        if (
            self.state.make.program_environment is not None
            or has_object_leaves
            or arena.op[info.row] in CALLS
            or len(info.info) <= bytes_max + arena.layout.row_bytes()
        ):
            return info
        # Event: An info of an env was larger than allowed, and was replaced.
        self.log.warning("info_dropped", env=info.row, info_bytes=len(info.info), info_bytes_max=bytes_max)
        return replace(info, info=codec.encode({control.INFO_DROPPED: True}))

    # --- processes ----------------------------------------------------------------------------------------------------

    def start_processes(self, processes: tuple[int, ...], spare: bool = False, shares_imports: bool = False) -> None:
        self._start(processes, self.zygote if shares_imports else None)

    def start_restored(self, process: int, snapshot: int) -> None:
        self._start((process,), self.snapshots[snapshot])
        if self.replays is not None and process in self.workers:
            self.replays.process_forked(process, by=-snapshot)

    def _start(self, processes: tuple[int, ...], zygote: SessionZygote | None) -> None:
        try:
            if isinstance(zygote, SnapshotProcess) and zygote.ended:
                raise ProcessLookupError("the process of the snapshot has ended")
            started = self.services.supervisor.start(self.number, processes, self.interpreter, self.environ, zygote)
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

    def fork_zygote(self, process: int, files: tuple[str, ...]) -> None:
        try:
            self.zygote = self.services.supervisor.session_zygote(self.imports_key, files)
        except OSError as error:
            self.report(SessionMachine.on_not_started, (), error.strerror or repr(error))
            return
        if process in self.workers:
            self.workers[process].send(control.ForkZygote(), *self.zygote.far_ends)
        self.zygote.close_far_ends()

    def take_snapshot(self, process: int, wanted: control.TakeSnapshot) -> None:
        if not wanted.forks:
            self.tell(process, wanted)
            return
        try:
            snapshot = self.services.supervisor.snapshot(self.number, -wanted.serial)
        except OSError as error:
            taken = control.SnapshotTaken(wanted.serial, [f"a process that cannot be started: {error.strerror}"])
            self.report(SessionMachine.on_message, WorkerMessage(process, taken))
            return
        self.snapshots[wanted.serial] = snapshot
        if self.replays is not None:
            self.replays.process_forked(-wanted.serial, by=process)
        if process in self.workers:
            self.workers[process].send(wanted, snapshot.far_ends[0])
        snapshot.close_far_ends()

    def _measure_a_snapshot(self) -> None:
        """Report the memory of one in turn: it grows as the worker that it is a copy of writes to what they share."""
        now_s = self.services.loop.clock.now_s()
        if not self.snapshots or now_s < self.snapshot_measured_s + SNAPSHOT_MEASURE_S:
            return
        self.snapshot_measured_s, serial = now_s, next(iter(self.snapshots))
        self.snapshots[serial] = snapshot = self.snapshots.pop(serial)
        if snapshot.pid is not None:
            self.report(SessionMachine.on_snapshot_born, serial, private_bytes(snapshot.pid))

    def drop_snapshot(self, serial: int) -> None:
        if (snapshot := self.snapshots.pop(serial, None)) is not None:
            snapshot.kill()
            if self.replays is not None:
                self.replays.process_ended(-serial)

    def assign(self, slot: int, process: int) -> None:
        self._label()
        # Event: A spare has taken the place of a worker that ended or left.
        self.log.info("spare_used", worker=slot)

    def tell(self, process: int, message: Any) -> None:
        given = [self.factories] if isinstance(message, control.Build) and message.factories else []
        if process in self.workers:
            self.workers[process].send(message, *given)

    def repeat_requests(self, process: int, name: str, requests: bytes) -> None:
        # They may be larger than what a socket takes at once, and messages with descriptors follow.
        with open(os.memfd_create("envhub-requests"), "r+b", buffering=0) as memory:
            memory.write(requests)
            if process in self.workers:
                self.workers[process].send(control.RepeatRequests(name), memory.fileno())

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

    def keep_replay(
        self, slot: int, process: int, failure: EnvFailure, row: int | None = None, trace: bytes = b""
    ) -> None:
        if self.replays is not None and self.memory is not None:
            self.life.replays.append(failure.replay)
            row = self.memory.progress(slot).row if row is None else row
            self.replays.env_failed(self.state.launcher, self.state.slots[slot], process, failure, row, trace)

    def hand_over(self, slot: int, process: int, message: control.Serve, replaced: int) -> None:
        memory, lost_rows = self.memory, self.lost_rows
        assert memory is not None and lost_rows is not None
        objects = lost_rows.objects(slot)
        if slot in lost_rows.losses:
            self.services.loop.poller.unregister(memory.slot_bells[slot])
            lost_rows.losses.pop(slot)
        if process in self.workers:
            self.serving[slot] = self.workers[process]
        # The last seeds of the envs; at first those that the envs of a lost session have left to these.
        rows, first = memory.rows(slot).tolist(), self.state.make.seeds or [None] * memory.arena.layout.rows
        seeds = [first[row] if (last := memory.arena.last_seed(row)) is None else last for row in rows]
        seeds = [reseeded(seed, replaced) for seed in seeds]
        self.tell(process, replace(message, seeds=seeds, objects=objects))

    def report_late(self, process: int, late: Late) -> None:
        tell = self.log.error if late.expired else self.log.warning
        # Event: An env is slow; as an error at its deadline, at which it counts as hung.
        tell("env_late", env=late.row, at=late.kind, waited_s=round(late.waited_s, 1), limit_s=late.limit_s)
        if process not in self.workers:
            return
        if late.kind == "close":
            self.workers[process].write_stacks()  # a slow end is no failure
        elif late.expired:
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
            text = f"{layout.nbytes()} bytes of shared memory are not available: {error}"
            self.report(SessionMachine.on_arena_refused, text)
            return
        if self.state.make.fresh:
            self.memory.arena.needs_reset[:] = FRESH
        self.lost_rows = LostWorkerRows(self.memory, ObjectCopies() if has_object_leaves else None, is_batch)

    def post_message(self) -> None:
        memory, request, workers = self.memory, self.under_way, self.serving
        assert memory is not None
        message = request.message
        if not self._put_message(messages.pack(message)):
            return
        if request.op is Op.RESET:
            memory.driver.post(OP_RESET)
        else:
            rows = memory.driver.post_call(OP_CALL if request.op is Op.CALL else OP_SET_ATTR, message.rows)
            slots = {row % len(self.state.slots) for row in rows}
            workers = {slot: worker for slot, worker in workers.items() if slot in slots}
        self.ring(workers.values())
        self.complete_posted_rows()

    def _put_message(self, message: Frame) -> bool:
        assert self.memory is not None
        self.services.unread.release()  # the results of the last call, which its client has read
        if problem := self.memory.put_message(message, self.budget):
            self.report(SessionMachine.on_not_posted, Failure("limit", "hub", f"{problem}; nothing was done"))
        return not problem

    def post_step(self) -> None:
        memory, request, lost_rows = self.memory, self.under_way, self.lost_rows
        assert memory is not None and lost_rows is not None
        frames = memory.frames
        try:
            frames.load(request.message.codes, request.frames)
        except ValueError as error:
            why = Failure("bad_actions", "request", f"{error}; no env has moved")
            self.report(SessionMachine.on_not_posted, why)
            return
        if frames.out_of_band and not self._put_message(request.frames[-1]):
            return
        memory.driver.post(OP_OUT_OF_BAND if frames.out_of_band else OP_STEP, frames.codes, frames.arrays)
        self.ring(self.serving.values())
        if lost_rows.losses:
            self.complete_posted_rows()

    def post_part(self) -> str:
        memory, request = self.memory, self.under_way
        assert memory is not None
        message = request.message
        try:
            rows, arrays = memory.frames.part(message.rows, message.codes, request.frames)
            memory.driver.post_rows(rows, message.codes, arrays)
        except ValueError as error:
            return str(error)
        slots = np.unique(rows % len(self.state.slots)).tolist()
        self.ring(filter(None, map(self.serving.get, slots)))
        self.complete_posted_rows()
        return ""

    def take_part(self, rows: int) -> None:
        self.part_rows = rows
        self.report_part()

    # --- rows without a process ---------------------------------------------------------------------------------------

    def take_rows(self, slot: int, process: int, loss: WorkerLoss, left: bool = False) -> None:
        if left:
            # Event: A worker was recycled: another one takes its rows over.
            self.log.info("worker_recycled", worker=slot)
        lost_rows = self.lost_rows
        assert lost_rows is not None
        if slot not in lost_rows.losses:
            # The bell is never read, since its client could make that block. By edges each ring is reported once.
            self.services.loop.poller.register(lost_rows.memory.slot_bells[slot], self.on_ready, edges=True)
        self.report_completed(lost_rows.take(slot, loss, left))

    def finish_steps(self, slot: int, loss: WorkerLoss) -> None:
        assert self.lost_rows is not None
        self.report_completed(self.lost_rows.finish(slot, loss))

    # --- who drives ---------------------------------------------------------------------------------------------------

    def grant(self) -> None:
        memory, side = self.memory, self.side
        assert memory is not None and side is not None
        self.ticket, self.side = b"", None
        descriptors = [memory.descriptor, memory.client_bell, *memory.slot_bells]
        spin_us = self.state.building.driver_spin_us
        shared = messages.Shared(memory.arena.layout.info_bytes, len(self.state.slots), spin_us)
        if not self.lane.send_memory(side, shared, descriptors, self.on_ready):
            self.report(SessionMachine.on_side_closed, True)

    def give_drive(self) -> None:
        assert self.memory is not None
        self.memory.arena.set_driver(DRIVER_CLIENT)

    def take_drive(self) -> None:
        assert self.memory is not None and self.lost_rows is not None
        self.memory.arena.set_driver(DRIVER_HUB)
        self.memory.driver.take_over()
        self.lost_rows.keep_objects()  # which a client that takes over has not seen

    def close_side(self) -> None:
        self.lane.close()
        self.ring(self.serving.values())  # the client may have posted rows and not have rung
        if self.lost_rows is not None:
            self.complete_posted_rows()

    def revoke(self) -> None:
        assert self.memory is not None
        self.life.ended_lane = self.state.lane.value
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

    def learn(self, shares_imports: bool) -> None:
        self.services.forked_imports.learn(self.state.make, shares_imports)

    def warn(self, event: str, fields: dict[str, Any]) -> None:
        self.log.warning(event, ("session", "worker", "message"), **fields)

    def end(self) -> None:
        if self.compressing is not None:
            self.after_reply(self.end)
            return
        self.refuse_side()
        self.lane.close()
        if self.zygote is not None:
            self.services.supervisor.zygotes.release(self.zygote)
        for serial in [*self.snapshots]:
            self.drop_snapshot(serial)
        if (lost_rows := self.lost_rows) is not None:
            for slot in lost_rows.losses:
                self.services.loop.poller.unregister(lost_rows.memory.slot_bells[slot])
        self.services.loop.poller.unregister(self.done_bell)
        os.close(self.done_bell)
        if self.factories >= 0:
            os.close(self.factories)
        if self.memory is not None:
            self._steps = self.memory.steps
            self.life.times = latencies(self.memory, len(self.state.slots))
            memory, self.memory, self.lost_rows = self.memory, None, None
            # A view of it, as in a reply that was not read, keeps it mapped.
            nbytes, ref = memory.nbytes, memory.arena.memory_ref()
            memory.close()
            del memory.arena, memory.driver, memory.frames
            now_s = self.services.loop.clock.now_s()
            self.services.unread.add(ref, nbytes, self.budget, self.connections, now_s)

    def _label(self) -> None:
        for process in self.state.slots.processes:
            if worker := self.workers.get(process.number):
                worker.label.update(session=self.name, worker=self.state.slots.worker(process.number))
