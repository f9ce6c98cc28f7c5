"""One session of a hub: its state machine, what tells the machine, and what the machine has the hub do.

Everything is decided by the state machine, by calls of its effects. What comes of one is put into the hub's queue of
events; so the state machine is never re-entered, and a session's events are handled in their order.
"""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from typing import Any

from envhub.arena.layout import Layout
from envhub.errors import shortened
from envhub.protocol import messages
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure, Op
from envhub.values import codec
from envhub_server.hub.effects import SessionEffects
from envhub_server.hub.replies import COMPRESSED
from envhub_server.hub.resources import ROWS_STOOD_IN, STEP_REQUESTED, Attaching
from envhub_server.ipc import control
from envhub_server.memory.session_memory import process_of
from envhub_server.processes.worker_handle import WorkerExited, WorkerSaid, WorkerStarted
from envhub_server.session.machine import SessionMachine
from envhub_server.session.phases import Driver

_OVERTAKEN = Failure("session_lost", "session", "another client took the session over")
# From these on a client may see no more of what the rows have shown: its step failed, or it was interrupted.
_KEEPING = (SessionMachine.on_rows_done, SessionMachine.on_request)
# What a client asks for while it drives; what its workers have said by then belongs to the answer.
_SIDE_REQUESTS = (messages.Collect, messages.TemplatesRequest)


class SessionRuntime(SessionEffects):
    """One session with everything it holds.

    Attributes:
        deadline_s: when the hub calls ``elapse``.
    """

    deadline_s = math.inf

    # --- what the machine is told -------------------------------------------------------------------------------------

    def start(self, request: Incoming) -> None:
        """Report that the session was made, by this request, which is answered once its envs exist."""
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

    def give_up_attach(self) -> None:
        """Report that the client that is to get the session is gone."""
        self.report(SessionMachine.on_attach_given_up)

    def request(self, request: Incoming) -> None:
        """Report the client's next request, after what workers said that belongs to its answer."""
        self.arrived = request
        if request.op is Op.STEP and self.state.ownership.driver is Driver.HUB:
            self.services.events.append((self.number, STEP_REQUESTED))
            return
        drives = self.state.ownership.driver is Driver.CLIENT
        if self.stand_ins is not None and (drives or isinstance(request.message, _SIDE_REQUESTS)):
            self.pool.read()
        self.report(SessionMachine.on_request, request.message, self.quiescent)

    def connect_side(self, side: socket.socket) -> None:
        """Report that the client is behind this socket."""
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
        used = self.pool.memory() if self.state.supervision.measures(self.services.clock.now_s()) else {}
        self.report(SessionMachine.on_elapsed, self.quiescent, progress, used)

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
        """Handle an event of a process, or one in place of a ring."""
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
        self.pool.remove(number)
        expected, reason = state.expects_end(number), state.supervision.reason(number)
        tell = self.log.info if expected else self.log.warning
        why = {"why": reason} if reason else {}
        tell("worker_exited", worker=state.slots.worker(number), how=exited.cause.how, **why)
        self.handle((SessionMachine.on_exited, (exited,)))
        for observer in self.observers:
            observer.process_ended(number, "" if expected else f"its worker {exited.cause.how}")

    def discard(self) -> None:
        """Free everything, though the state machine cannot say so any more."""
        self.pool.kill_all()
        self.state.discard()
        self.compressing = None
        self.end()

    def release(self) -> None:
        """Let go of the machine of an ended session, which refers to this."""
        del self.state

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
            case control.Built() as built:
                for observer in self.observers:
                    observer.worker_built(said.process, built)
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
        """True if this request is the last one of the row, which the process serves."""
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
