"""Inputs of a session's machine: bells, side socket, clock and messages of processes, as stimuli."""

from __future__ import annotations

import socket
from dataclasses import replace

from envhub.arena.layout import Layout
from envhub.errors import shortened
from envhub.protocol import messages
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure, Op, Step
from envhub.values import codec
from envhub_server.hub.holdings import Holdings
from envhub_server.ipc import control
from envhub_server.loop import Ringer
from envhub_server.memory.session_memory import SessionMemory, process_of
from envhub_server.processes.worker_events import WorkerSaid
from envhub_server.session import stimuli
from envhub_server.session.phases import Driver, Phase
from envhub_server.session.stimuli import Requested, Stimulus

# What a client asks for while it drives; what its workers have said by then belongs to the answer.
_SIDE_REQUESTS = (messages.Collect, messages.TemplatesRequest)
STEP_REQUESTED = Requested(Step(b""))  # the state machine does not look at the codes
ROWS_DONE = stimuli.RowsDone()
ROWS_STOOD_IN = stimuli.RowsDone()  # in place of a ring; the words in the arena say whether all are done


class Inputs:
    """Reports to the machine of one session, by the hub's queue of events."""

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._client_ringer = Ringer()
        # The bell is never read. By edges each ring is reported once, with a system call less.
        held.services.poller.register(held.done_bell, self, edges=True)

    # --- of the client ------------------------------------------------------------------------------------------------

    def request(self, request: Incoming) -> None:
        """Report the client's next request, after what workers said that belongs to its answer."""
        held = self._held
        held.arrived = request
        if request.op is Op.STEP and held.state.ownership.driver is Driver.HUB:
            held.services.events.append((held.number, STEP_REQUESTED))
            return
        drives = held.state.ownership.driver is Driver.CLIENT
        if held.stand_ins is not None and (drives or isinstance(request.message, _SIDE_REQUESTS)):
            held.pool.read()
        held.report(Requested(request.message, held.quiescent))

    def connect_side(self, side: socket.socket) -> None:
        """Report that the client is behind this socket."""
        held = self._held
        held.close_side()
        held.side = side
        held.report(stimuli.SideConnected(held.quiescent, process_of(side)))

    # --- of time, the arena and the side socket -----------------------------------------------------------------------

    def elapse(self) -> None:
        """Report that the time of the next deadline has come, with what the workers are at."""
        try:
            self._elapse()
        except Exception as error:
            self._held.broke(error)

    def _elapse(self) -> None:
        held = self._held
        memory = held.memory
        slots = range(len(held.state.slots))
        progress = tuple(None if memory is None else memory.progress(slot) for slot in slots)
        if held.stand_ins is not None:
            self.post_to_stand_ins()  # a client that ended may have posted rows and not have rung
        self.on_bell()  # a worker that is stopped, or lost its bell, may not have rung
        used = held.pool.memory() if held.state.supervision.measures(held.services.clock.now_s()) else {}
        held.report(stimuli.Elapsed(held.quiescent, progress, used))

    def on_ready(self, descriptor: int) -> None:
        """A bell has rung, or the client has left its side socket."""
        held = self._held
        try:
            if descriptor == held.done_bell:
                self.on_bell()
            elif held.lane.has(descriptor):
                held.report(stimuli.SideClosed(held.quiescent))
            elif held.memory is not None and held.stand_ins is not None and descriptor in held.memory.slot_bells:
                self.stand_in(held.stand_ins.posted(held.memory.slot_bells.index(descriptor)))
        except Exception as error:
            held.broke(error)

    def on_bell(self) -> None:
        """Report that rows are done if the words in the arena say so: a bell only wakes."""
        held = self._held
        memory = held.memory
        if memory is None:
            return
        if held.part_rows:
            self.report_part(memory)
        if held.state.phase is not Phase.MOVING or not memory.arena.quiescent():
            return
        held.has_infos = memory.arena.noted()
        if held.has_infos and memory.arena.info_form() is None and memory.arena.said_by_channel().any():
            held.pool.read()  # it was sent before the rows were done, so it is here by now
        held.services.events.append((held.number, ROWS_DONE))

    def report_part(self, memory: SessionMemory) -> None:
        """Report that the rows are done that RECEIVE waits for, once they are."""
        held = self._held
        driver = memory.driver
        if driver.done() < held.part_rows:
            return
        held.part_rows = 0
        rows, raised = driver.ready()
        driver.taken(rows if raised is None else raised)
        small, large = driver.infos(rows)
        if large or raised is not None:
            held.pool.read()  # it was sent before the rows were done, so it is here by now
        held.report(stimuli.PartDone(tuple(rows.tolist()), tuple(small.items()), tuple(large), raised))

    # --- of processes -------------------------------------------------------------------------------------------------

    def hear(self, said: WorkerSaid) -> WorkerSaid:
        """Log and note what a worker said; returns it with what the arena knows of it."""
        held = self._held
        match said.message:
            case control.Suspicious(row, what):
                # Event: An env does what it should not; it goes on.
                held.log.warning("env_suspicious", env=row, why=what)
            case control.Faulted(row, what):
                # Event: An env raised, or gave what is invalid: it is built again in its worker.
                held.log.warning("env_rebuilt", once_per=("session",), env=row, why=shortened(what, 200))
            case control.Built() as built:
                for observer in held.observers:
                    observer.worker_built(said.process, built)
            case control.RowInfo(row=row) as info if held.memory is not None and held.stand_ins is not None:
                info = self._limited(info, held.memory.arena.layout)
                said = replace(said, message=info, current=self._is_current(said.process, row, info.number))
                if said.current:
                    held.stand_ins.note(info)
                    held.memory.grow(row, len(info.info), held.budget)
            case control.RowFailed(failure=Failure(env_index=row)) as failed if held.memory is not None:
                said = replace(said, current=self._is_current(said.process, row, failed.number))
        return said

    def _is_current(self, number: int, row: int | None, request: int) -> bool:
        """True if this request is the last one of the row, which the process serves."""
        held = self._held
        process, memory = held.state.slots.process(number), held.memory
        return process is not None and memory is not None and memory.is_current(process.place, row, request)

    def _limited(self, info: control.RowInfo, layout: Layout) -> control.RowInfo:
        """The info, or what stands for one that no honest worker of a public hub sends; objects have no fixed size."""
        held = self._held
        loose = held.stand_ins is None or held.stand_ins.copies is not None
        bytes_max = held.state.launcher.rules.info_bytes_max
        if held.state.make.world is not None or loose or len(info.info) <= bytes_max + layout.row_bytes():
            return info
        # Event: An info of an env was larger than allowed, and was replaced.
        held.log.warning("info_dropped", env=info.row, info_bytes=len(info.info), info_bytes_max=bytes_max)
        return replace(info, info=codec.encode({control.INFO_DROPPED: True}))

    def ring_client(self) -> None:
        """Wake the client that drives."""
        assert self._held.memory is not None
        self._client_ringer.ring(self._held.memory.client_bell)

    # --- of rows without a process ------------------------------------------------------------------------------------

    def post_to_stand_ins(self) -> None:
        """Complete the steps that were posted to slots without a process, as far as they are to be."""
        held = self._held
        assert held.stand_ins is not None
        for slot in [*held.stand_ins.losses]:
            self.stand_in(held.stand_ins.posted(slot))

    def stand_in(self, reports: list[Stimulus]) -> None:
        """Report what was done in place of a worker, and wake the driver if there are rows done."""
        held = self._held
        for report in reports:
            held.report(report)
        assert held.memory is not None and held.stand_ins is not None
        if not held.stand_ins.unrung:
            return
        held.stand_ins.unrung = False
        if held.state.ownership.driver is Driver.CLIENT:
            self.ring_client()
        else:
            held.report(ROWS_STOOD_IN)  # not by the bell, which a worker may have filled
