"""A session's I/O: what it holds on this machine, and how the instructions of its state machine are carried out.

What is to be done is decided by the state machine. What comes of an instruction is put into the hub's queue of events
as another stimulus; so the state machine is never re-entered, and a session's events are handled in their order.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from envhub.arena.layout import Layout
from envhub.arena.memory import DRIVER_CLIENT, DRIVER_HUB, LARGE, OP_OUT_OF_BAND, OP_RESET, OP_STEP
from envhub.arena.stand_in import FRESH, REPORT_PENDING
from envhub.errors import shortened
from envhub.protocol import messages
from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Failure, Op, Step
from envhub.protocol.prelude import FRAME_BYTES_MAX, Frames
from envhub.values import codec
from envhub_server.catalog.step_cost_file import KnownCosts
from envhub_server.hub.compression_thread import CompressionThread
from envhub_server.hub.replay_keeper import ReplayKeeper
from envhub_server.hub.replay_writer import ReplayWriter
from envhub_server.hub.session_observer import Recipient, SessionObserver
from envhub_server.hub.worker_pool import WorkerPool, WorkerStarter
from envhub_server.ipc import control
from envhub_server.log import Logger
from envhub_server.loop.clock import Clock
from envhub_server.loop.poller import Poller
from envhub_server.loop.ringer import Ringer
from envhub_server.memory.session_memory import ArenaBudget, SessionMemory
from envhub_server.memory.shared_lane_grant import SharedLaneGrant
from envhub_server.memory.stand_ins import ObjectCopies, StandIns
from envhub_server.memory.step_io import Blob, LeafCompressors, row_frames
from envhub_server.memory.unread_memory import UnreadMemory
from envhub_server.network.side_socket import TICKET_BYTES
from envhub_server.processes.worker_events import Events, WorkerExited, WorkerSaid, WorkerStarted
from envhub_server.session import instructions, stimuli
from envhub_server.session.build_order import interpreter_of
from envhub_server.session.failure_text import Overrun, logged
from envhub_server.session.instructions import Instruction
from envhub_server.session.phases import Driver, Phase
from envhub_server.session.state import SessionState
from envhub_server.session.stimuli import Requested, Stimulus

INLINE_BYTES_MAX = 4 << 20  # of observations that the loop compresses itself, in some milliseconds
# What a client asks for while it drives; what its workers have said by then belongs to the answer.
_SIDE_REQUESTS = (messages.Collect, messages.TemplatesRequest, messages.HopsRequest)
STEP_REQUESTED = Requested(Step(b""))  # the state machine does not look at the codes
ROWS_DONE = stimuli.RowsDone()
_COMPRESSED = stimuli.RowsDone()  # in place of the end of a compression
_ROWS_STOOD_IN = stimuli.RowsDone()  # in place of a ring; the words in the arena say whether all are done

log = Logger("envhub.hub")


@dataclass(frozen=True)
class Services:
    """What all sessions of a hub have in common."""

    poller: Poller
    supervisor: WorkerStarter
    protocol: HubProtocol
    clock: Clock
    events: Events
    costs: KnownCosts
    unread: UnreadMemory
    replays: ReplayWriter | None = None
    compression: CompressionThread | None = None


@dataclass
class _Compressing:
    """A reply whose observations a thread compresses; until it is sent, nothing else happens to the session."""

    request: Incoming
    answer: instructions.Answer
    frames: Frames
    following: Sequence[Instruction] = ()  # that are carried out after it
    stimuli: list[Stimulus | WorkerStarted] = field(default_factory=list)  # that have come meanwhile
    error: Exception | None = None


class SessionRuntime:
    """One session with everything it holds.

    Attributes:
        number: the session's, which never changes; its events carry it.
        token: its token, another one after each takeover.
        compressing: the reply that a thread compresses; what was decided after it is carried out once it is sent.
        owner: the name of the client that it belongs to, see ``network.rights``; empty for the hub's user.
        origin: from where that client made it or took it over, as in the audit.
        state: its state machine.
        ticket: for the side socket, once; empty where there is none.
        heard_ns: when the request under way arrived.
        deadline_s: when the hub calls ``elapse``.
        observers: its recording and its replays, as far as it has any.
        connections: by which replies were sent under an earlier token, or were before the session ended.
    """

    def __init__(
        self,
        number: int,
        token: bytes,
        state: SessionState,
        services: Services,
        tickets: bool,
        owner: str,
        budget: ArenaBudget,
        factories: int = -1,
    ) -> None:
        """Of this state machine, which has handled nothing yet.

        ``tickets`` says whether the hub has a side socket; ``budget`` is that of the client's shared memory.
        ``factories`` is the memory of pickled factories, which the session closes; -1 for none.

        Raises:
            OSError: there is no descriptor left.
        """
        self.number = number
        self.token = token
        self.state = state
        self.owner, self.origin = owner, ""
        self.heard_ns = 0
        self.deadline_s = math.inf
        self.connections: set[int] = set()
        self._services = services
        self._budget = budget
        self._events = services.events
        self._arrived: Incoming | None = None  # the last request, which may wait in the queue
        self._request: Incoming | None = None  # the last one that was handled
        self._attach_request: Incoming | None = None  # of the client that takes the session over
        self._tickets = tickets
        self.ticket = self._new_ticket()
        self._side: socket.socket | None = None  # of a client that has shown the ticket
        self._memory: SessionMemory | None = None
        self._other: SessionMemory | None = None  # that the workers are moving to
        self._stand_ins: StandIns | None = None
        self._part_rows = 0  # how many of the rows of SEND the RECEIVE under way waits for
        self._passed_ns = [0, 0, 0, 0]  # when the last step was heard, rung, done and answered
        self._has_infos = False  # whether a row of the last move has something to say besides its arrays
        method = state.make.compression
        self._compressors = LeafCompressors(method) if method else None
        self.compressing: _Compressing | None = None
        self._grant = SharedLaneGrant(services.poller)
        self._factories = factories
        world = None if state.recipe.settings.python else state.make.world
        environ = None if world is None else world.environ
        self.interpreter = interpreter = interpreter_of(state.recipe.settings.interpreter, world)
        self._pool = WorkerPool(number, self.token.hex()[:8], services.supervisor, interpreter, environ)
        self.observers: tuple[SessionObserver, ...] = ()
        if services.replays is not None and state.launcher.rules.replays:
            self.observe_by(ReplayKeeper(services.replays, number, interpreter, state.make.faults))
        self._client_ringer = Ringer()
        self._done_bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # The bell is never read. By edges each ring is reported once, with a system call less.
        services.poller.register(self._done_bell, self, edges=True)

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return self._pool.pids

    @property
    def arena_bytes(self) -> int:
        """How much shared memory the session holds."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def memory(self) -> Mapping[int, int]:
        """How many bytes each process has besides what it was forked with, without those that end for their memory."""
        found = self._pool.own_memory().items()
        return {number: nbytes for number, nbytes in found if not self.state.supervision.overruns(number)}

    def overrun(self, process: int, overrun: Overrun) -> None:
        """Report that this process has too much memory, as the largest one of its client."""
        self._report(stimuli.QuotaOverrun(process, overrun))

    @property
    def quiescent(self) -> bool:
        """Whether every row is done."""
        return self._memory is None or self._memory.arena.quiescent()

    @property
    def observed_bytes(self) -> int:
        """The size of what ``observe`` copies."""
        return 0 if self._memory is None else sum(leaf[0].nbytes for leaf in self._memory.arena.observations)

    def observe(self, described: bool) -> tuple[messages.Observed, list[np.ndarray]]:
        """What its envs showed last, once they are made."""
        assert self._memory is not None and self.state.made is not None
        steps, given, found = self._memory.arena.last_observations()
        spaces = [] if described else self.state.made.observation_spaces
        return messages.Observed(self.state.make.num_envs, steps.tolist(), given.tolist(), spaces), found

    def observe_by(self, observer: SessionObserver | None) -> None:
        """Have an observer learn of what happens from now on, if there is one."""
        if observer is not None:
            self.observers = (*self.observers, observer)

    # --- what becomes a stimulus --------------------------------------------------------------------------------------

    def _report(self, stimulus: Stimulus) -> None:
        self._events.append((self.number, stimulus))

    def start(self, request: Incoming) -> None:
        """Report that the session was made, by this request, which is answered once its envs exist."""
        self._request = request
        self._report(stimuli.SessionMade())

    def request(self, request: Incoming) -> None:
        """Report the client's next request, after what workers have said that belongs to its answer."""
        self._arrived = request
        if request.op is Op.STEP and self.state.ownership.driver is Driver.HUB:
            self._events.append((self.number, STEP_REQUESTED))
            return
        drives = self.state.ownership.driver is Driver.CLIENT
        if self._stand_ins is not None and (drives or isinstance(request.message, _SIDE_REQUESTS)):
            self._pool.read()
        self._report(Requested(request.message, self.quiescent))

    def attach(self, request: Incoming, budget: ArenaBudget) -> None:
        """Go on for another client, whose request and whose budget of shared memory these are."""
        held = sum(each.nbytes for each in (self._memory, self._other) if each is not None)
        self._budget.use(-held)
        budget.use(held)
        self._budget = budget
        # While a reply is compressed, the event of an earlier request still waits; it is answered in this one's place.
        reported = self.compressing is not None and self._attach_request is not None
        self.token, self._attach_request, self.ticket = request.token, request, self._new_ticket()
        if not reported:
            self._report(stimuli.Attached(self.quiescent))

    def _new_ticket(self) -> bytes:
        return secrets.token_bytes(TICKET_BYTES) if self._tickets else b""

    def connect_side(self, side: socket.socket) -> None:
        """Report that the client is behind this socket."""
        self._on_RefuseSide()
        self._side = side
        self._report(stimuli.SideConnected(self.quiescent))

    def elapse(self) -> None:
        """Report that the time of the next deadline has come, with what the workers are at."""
        try:
            self._elapse()
        except Exception as error:
            self.broke(error)

    def _elapse(self) -> None:
        memory = self._memory
        slots = range(len(self.state.slots))
        progress = tuple(None if memory is None else memory.progress(slot) for slot in slots)
        if self._stand_ins is not None:
            self._post_to_stand_ins()  # a client that ended may have posted rows and not have rung
        self._on_bell()  # a worker that is stopped, or lost its bell, may not have rung
        used = self._pool.memory() if self.state.supervision.measures(self._services.clock.now_s()) else {}
        self._report(stimuli.Elapsed(self.quiescent, progress, used))

    def on_ready(self, descriptor: int) -> None:
        """A bell has rung, or the client has left its side socket."""
        try:
            if descriptor == self._done_bell:
                self._on_bell()
            elif self._grant.has(descriptor):
                self._report(stimuli.SideClosed(self.quiescent))
            elif self._memory is not None and self._stand_ins is not None and descriptor in self._memory.bells:
                self._stand_in(self._stand_ins.posted(self._memory.bells.index(descriptor) - 1))
        except Exception as error:
            self.broke(error)

    def broke(self, error: Exception) -> None:
        """Report a bug of the hub, or what a client has written into its memory: no other session pays for it."""
        history = [kind.__name__ for kind in self.state.history]
        self.log.error("internal_error", error=repr(error), history=history, exc_info=error)
        why = Failure("internal", "session", f"a bug in the hub or a worker: {error!r}")
        self._report(stimuli.Abandoned(why))

    def _on_bell(self) -> None:
        """Report that rows are done if the words in the arena say so: a bell only wakes."""
        memory = self._memory
        if memory is None:
            return
        if self._part_rows:
            self._report_part(memory)
        if self.state.phase is not Phase.MOVING or not memory.arena.quiescent():
            return
        if self._request is not None and self._request.op is Op.STEP:
            self._passed_ns[2] = time.monotonic_ns()
        self._has_infos = memory.arena.noted()
        if self._has_infos and memory.arena.info_form() is None and memory.arena.said_by_channel().any():
            self._pool.read()  # it was sent before the rows were done, so it is here by now
        self._events.append((self.number, ROWS_DONE))

    def _report_part(self, memory: SessionMemory) -> None:
        parts = memory.driver
        if parts.done() < self._part_rows:
            return
        self._part_rows = 0
        rows, raised = parts.ready()
        parts.taken(rows if raised is None else raised)
        small, large = parts.infos(rows)
        if large or raised is not None:
            self._pool.read()  # it was sent before the rows were done, so it is here by now
        self._report(stimuli.PartDone(tuple(rows.tolist()), tuple(small.items()), tuple(large), raised))

    # --- handling -----------------------------------------------------------------------------------------------------

    def handle(self, stimulus: Stimulus | WorkerStarted) -> None:
        """Have the state machine handle the stimulus, and carry out what it says."""
        if self.compressing is not None:
            self._while_compressing(self.compressing, stimulus)
            return
        if stimulus is _ROWS_STOOD_IN:
            self._on_bell()
            return
        if isinstance(stimulus, Requested):
            self._request = self._arrived
        elif isinstance(stimulus, WorkerStarted):
            self._pool.born(stimulus.pid)
            self.log.info("worker_started", worker=self.state.slots.worker(stimulus.process), pid=stimulus.pid)
            return
        elif isinstance(stimulus, WorkerExited):
            self._pool.remove(stimulus.process)
            self._log_exited(stimulus)
        elif isinstance(stimulus, WorkerSaid):
            stimulus = self._heard(stimulus)
        stand_ins = self._stand_ins
        if stand_ins is not None and stand_ins.copies is not None and isinstance(stimulus, _KEEPING):
            stand_ins.keep_objects()
        expected = isinstance(stimulus, WorkerExited) and self.state.expects_end(stimulus.process)
        self._carry_out(self.state.handle(stimulus, self._services.clock.now_s()))
        if isinstance(stimulus, WorkerExited):
            for observer in self.observers:
                observer.process_ended(stimulus.process, "" if expected else f"its worker {stimulus.cause.how}")

    def _carry_out(self, wanted: Sequence[Instruction]) -> None:
        for number, instruction in enumerate(wanted):
            _CARRIED_OUT[type(instruction)](self, instruction)
            if self.compressing is not None:
                self.compressing.following = wanted[number + 1 :]
                return

    def _while_compressing(self, reply: _Compressing, stimulus: Stimulus | WorkerStarted) -> None:
        """Keep the stimulus until the reply is sent; or send it, and go on as if that had taken no time."""
        if stimulus is not _COMPRESSED:
            reply.stimuli.append(stimulus)
            return
        self.compressing = None
        self._events.extendleft((self.number, each) for each in reversed(reply.stimuli))
        if reply.error is not None:
            raise reply.error
        self._send_answer(reply.request, reply.answer, reply.frames)
        self._carry_out(reply.following)

    def _log_exited(self, exited: WorkerExited) -> None:
        number = exited.process
        tell = self.log.info if self.state.expects_end(number) else self.log.warning
        reason = self.state.supervision.reason(number)
        why = {"why": reason} if reason else {}
        tell("worker_exited", worker=self.state.slots.worker(number), how=exited.cause.how, **why)

    def _heard(self, said: WorkerSaid) -> WorkerSaid:
        """Log and note what a worker said; returns it with what the arena knows of it."""
        match said.message:
            case control.Suspicious(row, what):
                self.log.warning("env_suspicious", env=row, why=what)
            case control.Faulted(row, what):
                self.log.warning("env_made_anew", env=row, why=shortened(what, 200))
            case control.Built() as built:
                for observer in self.observers:
                    observer.worker_built(said.process, built)
            case control.RowInfo(row=row) as info if self._memory is not None and self._stand_ins is not None:
                info = self._limited(info, self._memory.arena.layout)
                said = replace(said, message=info, current=self._is_current(said.process, row, info.number))
                if said.current:
                    self._stand_ins.note(info)
                    self._memory.grow(row, len(info.info), self._budget)
            case control.RowFailed(failure=Failure(env_index=row)) as failed if self._memory is not None:
                said = replace(said, current=self._is_current(said.process, row, failed.number))
        return said

    def _is_current(self, number: int, row: int | None, request: int) -> bool:
        """True if this request is the last one of the row, which the process serves."""
        process, memory = self.state.slots.process(number), self._memory
        return process is not None and memory is not None and memory.is_current(process.place, row, request)

    def _limited(self, info: control.RowInfo, layout: Layout) -> control.RowInfo:
        """The info, or what stands for one that no honest worker of a public hub sends; objects have no fixed size."""
        loose = self._stand_ins is None or self._stand_ins.copies is not None
        bytes_max = self.state.launcher.rules.info_bytes_max
        if self.state.make.world is not None or loose or len(info.info) <= bytes_max + layout.row_bytes():
            return info
        self.log.warning("info_dropped", env=info.row, info_bytes=len(info.info), info_bytes_max=bytes_max)
        return replace(info, info=codec.encode({control.INFO_DROPPED: True}))

    @property
    def log(self) -> Logger:
        """The log, with the session's name."""
        return log.bind(session=self.token.hex()[:8])

    # --- instructions: workers ----------------------------------------------------------------------------------------

    def _on_StartProcesses(self, instruction: instructions.StartProcesses) -> None:
        processes = instruction.processes
        try:
            self._pool.start(processes, instruction.libraries)
        except OSError as error:
            for process in processes:
                worker = self.state.slots.worker(process)
                self.log.warning("worker_exited", worker=worker, how=f"cannot be started: {error}")
            self._report(stimuli.WorkersNotStarted(processes, error.strerror or repr(error)))
        else:
            self._label()

    def _label(self) -> None:
        for process in self.state.slots.processes:
            self._pool.label(process.number, self.state.slots.worker(process.number))

    def _on_Assign(self, assigned: instructions.Assign) -> None:
        self._label()
        for observer in self.observers:
            observer.slot_assigned(assigned.process)
        self.log.info("worker_recycled" if assigned.recycled else "spare_used", worker=assigned.slot)

    def _on_Tell(self, instruction: instructions.Tell) -> None:
        message = instruction.message
        given = [self._factories] if isinstance(message, control.Build) and message.factories else []
        self._pool.tell(instruction.process, message, *given)

    def _on_GiveArena(self, instruction: instructions.GiveArena) -> None:
        memory = self._other or self._memory
        if memory is None:
            return
        client_bell, *bells = memory.bells
        process, slots, layout = instruction.process, self.state.slots, memory.arena.layout
        rows, making = slots[instruction.slot].rows, self.state.making
        recipient = Recipient(process, instruction.slot, rows, len(slots), layout, making, self.log)
        message, given = instruction.message, []
        for observer in self.observers:
            message, descriptors = observer.arena_given(recipient, message)
            given += descriptors
        own = memory.descriptor, bells[instruction.slot], self._done_bell, client_bell
        self._pool.map_arena(process, message, *own, *given)
        for descriptor in given:
            os.close(descriptor)

    def _on_KeepReplay(self, wanted: instructions.KeepReplay) -> None:
        if self._memory is None:
            return
        rows, output = self.state.slots[wanted.slot].rows, self._pool.output(wanted.process)
        for observer in self.observers:
            observer.env_failed(wanted, rows, self._memory, output, self.owner)

    def _on_HandOver(self, instruction: instructions.HandOver) -> None:
        slot, process, message = instruction.slot, instruction.process, instruction.message
        memory, stand_ins = self._memory, self._stand_ins
        assert memory is not None and stand_ins is not None
        objects = stand_ins.objects(slot)
        if slot in stand_ins.losses:
            self._ignore_bell(slot)
            stand_ins.release(slot)
        self._pool.serve(slot, process)
        self._pool.tell(process, replace(message, objects=objects))
        rows, request, done, op, _ = memory.words(slot)
        waiting = set(op[request != done].tolist())
        if OP_OUT_OF_BAND in waiting and not message.ending:  # else the step has been made, and only its end is due
            self._pool.tell(process, control.StepRows(memory.frames.out_of_band_of(rows.tolist())))
        reset = isinstance(instruction.pending, control.ResetRows)
        if instruction.pending is not None and (OP_RESET in waiting or not reset):
            self._pool.tell(process, instruction.pending)

    def _on_ReportLate(self, instruction: instructions.ReportLate) -> None:
        late = instruction.late
        tell = self.log.error if late.over else self.log.warning
        tell("env_late", env=late.row, at=late.kind, waited_s=round(late.waited_s, 1), limit_s=late.limit_s)
        if late.over:
            self._pool.dump(instruction.process)

    def _on_Kill(self, instruction: instructions.Kill) -> None:
        self._pool.kill(instruction.process)

    # --- instructions: the arena --------------------------------------------------------------------------------------

    def _on_MakeArena(self, instruction: instructions.MakeArena) -> None:
        layout = instruction.layout
        for observer in self.observers:
            if why := observer.arena_made(layout, instruction.loose):
                self._report(stimuli.ArenaRefused(why))
                return
        batch = max((layout.batch_bytes(leaf) for leaf in layout.observations), default=0)
        if batch > FRAME_BYTES_MAX:
            text = f"{batch} bytes of observations in a frame of each reply; at most {FRAME_BYTES_MAX} are sent"
            self._report(stimuli.ArenaRefused(text))
            return
        try:
            self._memory = SessionMemory(layout, len(self.state.slots), self._budget)
        except OSError as error:
            self._report(stimuli.ArenaRefused(f"{layout.nbytes()} bytes of shared memory cannot be had: {error}"))
            return
        if self.state.make.lost or self.state.make.fresh:
            self._memory.arena.needs_reset[:] = REPORT_PENDING if self.state.make.lost else FRESH
        copies = ObjectCopies() if instruction.loose else None
        self._stand_ins = StandIns(self._memory, copies, instruction.is_batch)

    def _on_MakeOtherArena(self, _: instructions.MakeOtherArena) -> None:
        assert self._memory is not None
        try:
            self._other = SessionMemory(self._memory.arena.layout, len(self.state.slots), self._budget)
        except OSError as error:
            self._report(stimuli.OtherArenaRefused(str(error)))
        else:
            self._report(stimuli.OtherArenaMade())

    def _on_DropOtherArena(self, _: instructions.DropOtherArena) -> None:
        if self._other is not None:
            other, self._other = self._other, None
            self._let_go(other)

    def _on_UseOtherArena(self, _: instructions.UseOtherArena) -> None:
        old, memory, stand_ins = self._memory, self._other, self._stand_ins
        assert old is not None and memory is not None and stand_ins is not None
        memory.move_from(old, self._budget)
        for worker in stand_ins.losses:
            self._ignore_bell(worker)
        self._memory, self._other, stand_ins.memory = memory, None, memory
        for worker in stand_ins.losses:
            self._hear_bell(worker)
        self._let_go(old)

    def _let_go(self, memory: SessionMemory) -> None:
        """Close memory that is used no more; a view of it, as in a reply that was not read, keeps it mapped."""
        nbytes, ref = memory.nbytes, memory.arena.memory_ref()
        memory.close()
        del memory.arena, memory.driver, memory.frames
        now_s = self._services.clock.now_s()
        self._services.unread.add(ref, nbytes, self._budget, self.connections, now_s)

    def _on_PostReset(self, _: instructions.PostReset) -> None:
        assert self._memory is not None
        self._memory.driver.post(OP_RESET)

    def _on_PostStep(self, _: instructions.PostStep) -> None:
        memory, request, stand_ins = self._memory, self._request, self._stand_ins
        assert memory is not None and request is not None and stand_ins is not None
        frames = memory.frames
        if problem := frames.load(request.message.codes, request.frames):
            self._report(stimuli.ActionsRefused(problem))
            return
        memory.driver.post(OP_OUT_OF_BAND if frames.out_of_band else OP_STEP, frames.codes, frames.arrays)
        if frames.out_of_band:
            for slot in self.state.slots:
                if slot.process is not None and slot.index not in stand_ins.losses:
                    self._pool.tell(slot.process.number, control.StepRows(frames.out_of_band_of(slot.rows)))
        else:
            self._pool.ring()
        if stand_ins.losses:
            self._post_to_stand_ins()
        self._passed_ns[:2] = self.heard_ns, time.monotonic_ns()

    def _on_PostPart(self, _: instructions.PostPart) -> None:
        memory, request = self._memory, self._request
        assert memory is not None and request is not None
        message = request.message
        try:
            rows, arrays = memory.frames.part(message.rows, message.codes, request.frames)
            memory.driver.post_rows(rows, message.codes, arrays)
        except ValueError as error:
            self._report(stimuli.ActionsRefused(f"{error}; no env has moved"))
            return
        self._report(stimuli.PartPosted(len(rows)))
        self._pool.ring_some(np.unique(rows % len(self.state.slots)).tolist())
        self._post_to_stand_ins()

    def _on_TakePart(self, instruction: instructions.TakePart) -> None:
        self._part_rows = instruction.rows
        assert self._memory is not None
        self._report_part(self._memory)

    # --- instructions: results in place of workers that have ended ----------------------------------------------------

    def _on_TakeRows(self, lost: instructions.TakeRows) -> None:
        for observer in self.observers:
            observer.rows_lost(lost.process, lost.loss.failure.message)
        stand_ins = self._stand_ins
        assert stand_ins is not None
        if lost.slot not in stand_ins.losses:
            self._hear_bell(lost.slot)
        self._stand_in(stand_ins.take(lost.slot, lost.loss, lost.resetting))

    def _on_KeepRows(self, instruction: instructions.KeepRows) -> None:
        assert self._stand_ins is not None
        self._stand_in(self._stand_ins.keep(instruction.slot))

    def _on_FinishSteps(self, instruction: instructions.FinishSteps) -> None:
        assert self._stand_ins is not None
        self._stand_in(self._stand_ins.finish(instruction.slot, instruction.loss))

    def _post_to_stand_ins(self) -> None:
        assert self._stand_ins is not None
        for slot in [*self._stand_ins.losses]:
            self._stand_in(self._stand_ins.posted(slot))

    def _stand_in(self, reports: list[Stimulus]) -> None:
        """Report what was done in place of a worker, and wake the driver if there are rows done."""
        for report in reports:
            self._report(report)
        assert self._memory is not None and self._stand_ins is not None
        if not self._stand_ins.unrung:
            return
        self._stand_ins.unrung = False
        if self.state.ownership.driver is Driver.CLIENT:
            self._client_ringer.ring(self._memory.bells[0])
        else:
            self._report(_ROWS_STOOD_IN)  # not by the bell, which a worker may have filled

    def _hear_bell(self, worker: int) -> None:
        # The bell is never read, since its client could make that block. By edges each ring is reported once.
        if self._memory is not None:
            self._services.poller.register(self._memory.bells[1 + worker], self, edges=True)

    def _ignore_bell(self, worker: int) -> None:
        if self._memory is not None:
            self._services.poller.unregister(self._memory.bells[1 + worker])

    # --- instructions: who drives -------------------------------------------------------------------------------------

    def _on_Grant(self, _: instructions.Grant) -> None:
        memory, side = self._memory, self._side
        assert memory is not None and side is not None
        self.ticket, self._side = b"", None
        spin_us = self.state.sizing.driver_spin_us
        shared = messages.Shared(memory.arena.layout.info_bytes, len(self.state.slots), spin_us)
        if not self._grant.share(side, shared, [memory.descriptor, *memory.bells], self):
            self._report(stimuli.SideClosed(quiescent=True))

    def _on_RefuseSide(self, _: instructions.RefuseSide | None = None) -> None:
        if self._side is not None:
            self._side.close()
            self._side = None

    def _on_GiveDrive(self, _: instructions.GiveDrive) -> None:
        assert self._memory is not None
        self._memory.arena.hand_over(DRIVER_CLIENT)

    def _on_TakeDrive(self, _: instructions.TakeDrive) -> None:
        assert self._memory is not None and self._stand_ins is not None
        self._memory.arena.hand_over(DRIVER_HUB)
        self._memory.driver.take_over()
        self._stand_ins.keep_objects()  # which a client that takes over has not seen

    def _on_CloseSide(self, _: instructions.CloseSide) -> None:
        self._grant.close()
        self._pool.ring()  # the client may have posted rows and not have rung
        if self._stand_ins is not None:
            self._post_to_stand_ins()

    def _on_Revoke(self, _: instructions.Revoke) -> None:
        assert self._memory is not None
        self._grant.revoke(self._memory.arena)

    def _on_WindUp(self, _: instructions.WindUp) -> None:
        assert self._memory is not None
        self._memory.arena.wind_up()

    # --- instructions: the client -------------------------------------------------------------------------------------

    def _on_Answer(self, answer: instructions.Answer) -> None:
        request = self._request
        assert request is not None
        frames: list[Any] = []
        if self._memory is not None:
            if answer.arrays:
                infos = self.state.infos.large if self._has_infos else None
                frames = self._memory.frames.batch(request.op is Op.STEP, infos)
                if self._compressors is not None and self._compresses(request, answer, frames, first=0):
                    return
            elif answer.part is not None:
                frames = self._memory.frames.rows(np.array(answer.part, np.int64), answer.rows)
                if self._compressors is not None and self._compresses(request, answer, frames, first=1):
                    return
            elif request.op is Op.CALL:
                frames, why = self._services.unread.results(answer.rows, request.message.apart, self._budget)
                if why:
                    self._fail(request, Failure("limit", "hub", why))
                    return
            else:
                frames = row_frames(answer.rows if request.op is not Op.COLLECT else self._collected(answer.rows))
        self._send_answer(request, answer, frames)

    def _collected(self, sent: Sequence[Blob]) -> Sequence[Blob]:
        """These infos that workers have sent, and the wanted ones that are in places which the client cannot read."""
        assert self._memory is not None and self._request is not None
        arena, found = self._memory.arena, dict(sent)
        for row in self._request.message.rows:
            if row < arena.layout.rows and arena.info_template[row] == LARGE:
                found[row] = bytes(arena.info(row) or b"")  # what was sent is of an earlier step
        return sorted(found.items())

    def _compresses(self, request: Incoming, answer: instructions.Answer, frames: Frames, first: int) -> bool:
        """Compress the observations, which begin at the frame ``first``; whether a thread does it, and they are late.

        The session's rows are not written meanwhile: a reply of views is given to its client until the next request.
        """
        assert self._memory is not None and self._compressors is not None
        compressors, place = self._compressors, slice(first, first + len(self._memory.arena.layout.observations))
        thread = self._services.compression
        if thread is None or sum(memoryview(frame).nbytes for frame in frames[place]) <= INLINE_BYTES_MAX:
            frames[place] = compressors.compress(frames[place])
            return False
        reply = _Compressing(request, answer, frames)

        def work() -> None:
            try:
                frames[place] = compressors.compress(frames[place])
            except Exception as error:
                reply.error = error

        try:
            thread.do(work, lambda: self._report(_COMPRESSED))
        except RuntimeError:  # no thread is left
            frames[place] = compressors.compress(frames[place])
            return False
        self.compressing = reply
        return True

    def _send_answer(self, request: Incoming, answer: instructions.Answer, frames: Frames) -> None:
        if frames and max(map(len, frames)) > FRAME_BYTES_MAX:
            text = f"infos or results of {max(map(len, frames))} bytes; a reply carries at most {FRAME_BYTES_MAX}"
            self._fail(request, Failure("limit", "hub", text))
            return
        message = answer.message
        if type(message) is messages.Made:
            message = replace(message, ticket=self.ticket)
            self.log.info("session_ready", num_workers=message.num_workers, why=message.sizing)
        self._services.protocol.answer(request, message, frames)
        if request.op is Op.STEP:
            self._passed_ns[3] = time.monotonic_ns()

    def _on_Fail(self, fail: instructions.Fail) -> None:
        self._fail(self._request, fail.failure)

    def _fail(self, request: Incoming | None, failure: Failure) -> None:
        assert request is not None
        if failure.scope in ("env", "session"):
            self.log.warning("request_failed", **logged(failure))
        self._services.protocol.fail(request, failure)

    def _on_AnswerHops(self, _: instructions.AnswerHops) -> None:
        assert self._request is not None
        heard, rung, woke, answered = self._passed_ns
        began, ended = ([], []) if self._memory is None else self._memory.batches()
        hops = messages.Hops(heard, rung, woke, answered, began, ended)
        self._services.protocol.answer(self._request, hops, ())

    def _on_AnswerAttach(self, _: instructions.AnswerAttach) -> None:
        memory, request, made = self._memory, self._attach_request, self.state.made
        assert memory is not None and request is not None and made is not None
        self._request, self._attach_request = request, None
        made = replace(made, ticket=self.ticket, steps=memory.arena.done.tolist())
        self.log.info("session_ready", num_workers=made.num_workers, why=made.sizing)
        self._services.protocol.answer(request, made, ())

    def _on_FailAttach(self, fail: instructions.FailAttach) -> None:
        request, self._attach_request = self._attach_request, None
        self._fail(request, fail.failure)

    def _on_Goodbye(self, goodbye: instructions.Goodbye) -> None:
        self._services.protocol.goodbye(self.token, goodbye.why)

    def _on_Notify(self, notice: instructions.Notify) -> None:
        self.log.warning(notice.event, note=notice.text)
        self._services.protocol.notice(self.token, notice.text)

    def _on_LearnCost(self, learned: instructions.LearnCost) -> None:
        self._services.costs.note(self.state.make, learned.cost)

    def _on_Warn(self, warning: instructions.Warn) -> None:
        self.log.warning(warning.event, **warning.fields)

    def discard(self) -> None:
        """Free everything, though the state machine cannot say so any more."""
        self._pool.kill_all()
        self.state.phase = Phase.ENDED
        self._on_End(instructions.End())

    def _on_End(self, _: instructions.End) -> None:
        self._on_RefuseSide()
        self._grant.close()
        for worker in self._stand_ins.losses if self._stand_ins is not None else ():
            self._ignore_bell(worker)
        self._services.poller.unregister(self._done_bell)
        os.close(self._done_bell)
        if self._factories >= 0:
            os.close(self._factories)
        for observer in self.observers:
            observer.session_ended()
        self._on_DropOtherArena(instructions.DropOtherArena())
        if self._memory is not None:
            memory, self._memory, self._stand_ins = self._memory, None, None
            self._let_go(memory)


# From these on a client may see no more of what the rows have shown: its step failed, or it was interrupted.
_KEEPING = (stimuli.RowsDone, Requested)
_CARRIED_OUT: Mapping[type, Callable[[SessionRuntime, Any], None]] = {
    kind: getattr(SessionRuntime, f"_on_{kind.__name__}") for kind in Instruction.__subclasses__()
}
