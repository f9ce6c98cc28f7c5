"""What a session holds on this machine, its workers and its memory, and how its instructions are carried out."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import structlog

from envhub.arena.memory import DRIVER_CLIENT, DRIVER_HUB, OP_OUT_OF_BAND, OP_STEP, Arena
from envhub.arena.stand_in import FRESH, REPORT_PENDING
from envhub.protocol import messages
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure, Made, Make, Op
from envhub.protocol.prelude import FRAME_BYTES_MAX
from envhub_server.hub.outcomes import Outcomes
from envhub_server.hub.takeover import Succession
from envhub_server.hub.worker_pool import Crew, ring
from envhub_server.ipc import control
from envhub_server.loop.poller import Watch
from envhub_server.memory.reply_frames import Sendable, Sender, batch_frames, part_frames, row_frames
from envhub_server.memory.session_memory import Memory
from envhub_server.memory.shared_lane_grant import Driving
from envhub_server.network.side_socket import TICKET_BYTES
from envhub_server.processes.exit_cause import Ending
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import Handlers
from envhub_server.session.instructions import (
    Answer,
    ArenaRefused,
    Drive,
    End,
    Exited,
    Fail,
    HandOver,
    Instruction,
    Instructions,
    Kill,
    LearnCost,
    MakeArena,
    MapArena,
    Notify,
    Received,
    Sent,
    StartWorkers,
    TakeOver,
    Tell,
)
from envhub_server.session.state import Phase, Session

ASIDE = (messages.Collect, messages.TemplatesRequest, messages.HopsRequest)  # what a client asks for while it drives

_OVER = (Phase.BROKEN, Phase.CLOSING)

log = structlog.get_logger("envhub.hub")


class Host:
    """One session with everything it holds.

    Attributes:
        token: the session's.
        session: its state machine.
        ticket: for the side socket, once; empty where there is none.
        heard_ns: when the request under way arrived.
        close_by_s: when its workers are killed if they have not ended by themselves.
    """

    def __init__(
        self,
        token: bytes,
        session: Session,
        watch: Watch,
        supervisor: Supervisor,
        outcomes: Outcomes,
        ticket: bytes = b"",
    ) -> None:
        self.token = token
        self.session = session
        self.ticket = ticket
        self.heard_ns = 0
        self.close_by_s: float | None = None
        self._watch = watch
        self._outcomes = outcomes
        self._request: Incoming | None = None
        self._succession: Succession | None = None  # while another client takes the session over
        self._tickets = bool(ticket)
        self._crew = Crew(session.make, watch, supervisor, self._handlers, outcomes.now_s, self._log)
        self._memory: Memory | None = None
        self._passed_ns = [0, 0, 0, 0]  # when the last step was heard, rung, done and answered
        self._noted = False  # whether a row of the last move has something to say besides its arrays
        method = session.make.compression
        self._sendable: Sendable = Sender(method).sendable if method else list
        self._driving = Driving(watch, partial(self._guarded, self._on_side))
        self._done_bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Never read: by edges each ring is heard once all the same, with a system call less.
        watch.watch_edges(self._done_bell, self._on_done_bell)

    @property
    def _arena(self) -> Arena | None:
        return None if self._memory is None else self._memory.arena

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return self._crew.pids

    @property
    def arena_bytes(self) -> int:
        """How much shared memory the session holds."""
        return 0 if self._arena is None else self._arena.layout.nbytes()

    @property
    def lane(self) -> str:
        """How its client steps it."""
        return "shared" if self._driving.shared else "wire"

    @property
    def idle(self) -> bool:
        """Whether no request is under way, whoever drives."""
        by_parts = self._memory is not None and self._memory.driver.outstanding
        return self.session.idle and not by_parts and (self._arena is None or self._arena.quiescent())

    # --- what the hub calls -----------------------------------------------------------------------------------------

    def start(self, request: Incoming, make: Make) -> None:
        """Start the workers and have them build the envs."""
        self._request = request
        self._apply(self.session.start())

    def _start_workers(self, numbers: Sequence[int]) -> None:
        if self._arena is None:
            self._crew.settle(len(self.session.blocks))
        try:
            self._crew.start(numbers)
        except OSError as error:
            if self.session.making:
                refusal = Failure("limit", "hub", f"a worker cannot be started: {error}")
                self._apply(self.session.abandon(refusal, terminate=True))
            for number in numbers:
                self._on_exit(number, Ending(f"cannot be started: {error}"))

    def _log(self) -> Any:
        return log.bind(session=self.token.hex()[:8])

    def _handlers(self, number: int) -> Handlers:
        return Handlers(
            partial(self._on_message, number),
            partial(self._on_exit, number),
            partial(self._outcomes.worker_started, self, number),
        )

    def request(self, request: Incoming) -> None:
        """Carry out the client's next request."""
        self._request = request
        message, memory = request.message, self._memory
        if isinstance(message, messages.HopsRequest):
            heard, rung, woke, answered = self._passed_ns
            began, ended = ([], []) if memory is None else memory.batches()
            self._outcomes.answer(request, messages.Hops(heard, rung, woke, answered, began, ended), ())
            return
        if isinstance(message, ASIDE):
            self._crew.hear()  # it asks for what they have said, whoever drives
            self._crew.keep_loose()  # it may learn that its step has failed
        elif self._driving.driver != DRIVER_HUB and not self._take_drive(request):
            return
        if memory is not None and memory.driver.steps_parts and not self._may_interrupt(request):
            return
        problem = ""
        if isinstance(message, messages.Step):
            if memory is not None and self.session.phase is Phase.READY:  # else the session says why not
                problem = memory.frames.load(message.codes, request.frames)
        elif isinstance(message, messages.Send):
            problem = self._send_part(request)
        if problem:
            self._fail(Failure("bad_actions", "request", problem))
            return
        self._apply(self.session.request(message))
        if isinstance(message, messages.Send) and not self.session.idle:
            self._apply(self.session.event(-1, Sent()))
        if isinstance(message, messages.Receive):
            self._receive_part()

    # --- takeover ---------------------------------------------------------------------------------------------------

    def attach(self, request: Incoming) -> None:
        """Go on for another client, as soon as nothing is under way; the one before is locked out from now on."""
        self.token = request.token
        self._succession = self._succession or Succession(self.session, self._crew, self._done_bell)
        self._succession.heir = request  # who came before is told, when it asks, that it has lost the session again
        self.ticket = secrets.token_bytes(TICKET_BYTES) if self._tickets else b""
        if self._arena is not None:
            self._driving.revoke(self._arena)
            self._driving.close()
            self._crew.ring()  # a client that ended may have posted rows and not have rung
        self._settle()

    def _settle(self) -> None:
        """Go on with a takeover, as far as it goes now."""
        if self._succession is None or self._memory is None:
            return
        found = self._succession.settle(self._memory, self._driving.lent)
        if found is None:
            return
        heir, self._succession = self._succession.heir, None
        assert heir is not None
        if isinstance(found, Failure):
            self._outcomes.fail(heir, found)
            return
        if found is not self._memory:
            self._memory.close()
            self._memory, self._driving = found, Driving(self._watch, partial(self._guarded, self._on_side))
        self._memory.driver.take_over()
        self._crew.keep_loose()  # which the new client has not seen
        self._request = heir
        assert self.session.made is not None
        made = replace(self.session.made, ticket=self.ticket, steps=self._memory.arena.done.tolist())
        self._outcomes.answer(heir, made, ())

    def observe(self, described: bool) -> tuple[messages.Observed, list[Any]] | None:
        """What its envs showed last; None before they have."""
        if self._arena is None or self.session.made is None:
            return None
        steps, given, found = self._arena.last_observations()
        spaces = [] if described else self.session.made.observation_spaces
        return messages.Observed(self.session.make.num_envs, steps.tolist(), given.tolist(), spaces), found

    def wind_up(self) -> None:
        """Have nobody begin anything more, for the hub is shutting down."""
        if self._memory is not None:
            self._driving.wind_up(self._memory.arena)

    def abandon(self, why: Failure, terminate: bool = False) -> None:
        """End the session without its client's wish."""
        self._apply(self.session.abandon(why, terminate))

    # --- parts of a batch -------------------------------------------------------------------------------------------

    def _may_interrupt(self, request: Incoming) -> bool:
        """Whether nothing is under way by parts that forbids the request; else it is refused."""
        by_parts = isinstance(request.message, (messages.Send, messages.Receive, messages.Close, *ASIDE))
        assert self._memory is not None
        if by_parts or not self._memory.driver.outstanding or self.session.phase is not Phase.READY:
            return True
        text = "envs are under way that RECEIVE has not returned"
        self._fail(Failure("refused", "request", text))
        return False

    def _fail(self, failure: Failure) -> None:
        """Answer the request under way with a failure."""
        assert self._request is not None
        self._crew.rest()
        if self._driving.lent:
            self._give_drive()
        self._outcomes.fail(self._request, failure)

    def _send_part(self, request: Incoming) -> str:
        """Hand a part of the batch to its workers; what is wrong with it, if so."""
        memory = self._memory
        if memory is None or self.session.phase is not Phase.READY:
            return ""  # the session says why not
        try:
            rows, arrays = memory.frames.part(request.message.rows, request.message.codes, request.frames)
            memory.driver.post_rows(rows, request.message.codes, arrays)
        except ValueError as error:
            return f"{error}; no env has moved"
        self._crew.ring(*np.unique(rows % len(self.session.blocks)).tolist())
        return ""

    def _receive_part(self) -> None:
        """Answer a RECEIVE that waits, if enough of the envs are done."""
        waits = self._request is not None and isinstance(self._request.message, messages.Receive)
        if not waits or self.session.idle or self.session.phase is not Phase.READY:
            return
        assert self._request is not None
        parts = None if self._memory is None else self._memory.driver
        if parts is None or not parts.outstanding:
            self._apply(self.session.abstain(Failure("refused", "request", "no env is under way")))
            return
        if parts.done() < min(self._request.message.min_envs, parts.outstanding):
            return
        rows, raised = parts.ready()
        parts.taken(rows if raised is None else raised)
        small, large = parts.infos(rows)
        if large or raised is not None:
            self._crew.hear()  # it was sent before the rows were done, so it is here by now
        self._apply(self.session.event(-1, Received(tuple(rows.tolist()), tuple(small.items()), tuple(large), raised)))

    # --- who drives -------------------------------------------------------------------------------------------------

    def share(self, side: socket.socket) -> bool:
        """Let the client that is behind this socket drive; whether it may."""
        if self._memory is None or self._driving.shared or self.session.phase is not Phase.READY or not self.idle:
            return False
        self.ticket = b""
        shared = messages.Shared(self._memory.arena.layout.info_bytes, len(self.session.blocks), self.session.spin_us)
        if not self._driving.share(side, shared, [self._memory.descriptor, *self._memory.bells]):
            return False
        self._give_drive()
        return True

    def _give_drive(self) -> None:
        if self._arena is not None and self.session.phase is Phase.READY:
            self._driving.give(self._arena)

    def _take_drive(self, request: Incoming) -> bool:
        """Drive from now on; a client that drives asks for nothing but CLOSE before its step has ended."""
        arena = self._arena
        if arena is None or self.session.phase is not Phase.READY:
            return True
        if isinstance(request.message, messages.Close):
            return True
        if not self._driving.take(arena):
            text = "a step that the client drives has not ended; wait for it"
            self._outcomes.fail(request, Failure("refused", "request", text))
            return False
        assert self._memory is not None
        self._memory.driver.forget()
        self._crew.hear()
        self._crew.keep_loose()  # an interrupt may have kept the client from seeing them
        return True

    def _on_side(self) -> None:
        """The client says nothing here: it has closed the socket, or has ended."""
        self._driving.close()
        self._crew.ring()  # it may have posted rows and not have rung
        if self._arena is not None and self._driving.driver == DRIVER_CLIENT:
            self._driving.take(self._arena)

    def _revoke(self) -> None:
        if self._arena is not None:
            self._driving.revoke(self._arena)

    # --- events -----------------------------------------------------------------------------------------------------

    # Should what a client wrote into its memory make the hub fail, its session pays for it and no other.

    def _guarded(self, handler: Callable[[], None]) -> None:
        try:
            handler()
        except Exception as error:
            self._outcomes.broke(self, error)

    def _on_done_bell(self) -> None:
        """Answer the request under way if the words in the arena say that its rows are done: a bell only wakes."""
        memory = self._memory
        if memory is None:
            return
        try:
            if memory.driver.steps_parts:
                self._receive_part()
            if self.session.phase is not Phase.MOVING or not memory.arena.quiescent():
                return
            woke_ns = time.monotonic_ns()
            self._noted = memory.arena.noted()
            if self._noted and memory.arena.said_by_channel().any():
                self._crew.hear()  # it was sent before the rows were done, so it is here by now
            if self._crew.loose is not None:
                self._crew.keep_loose()
            stepped = self._request is not None and self._request.op is Op.STEP
            self._apply(self.session.moved())
            if stepped:
                self._passed_ns[2:] = woke_ns, time.monotonic_ns()
        except Exception as error:
            self._outcomes.broke(self, error)

    def _on_message(self, number: int, message: Any) -> None:
        try:
            if not self._crew.on_message(number, message):
                return
            if isinstance(message, control.Mapped) and self._crew.moved(number):
                self._settle()
                return
            self._apply(self.session.event(number, message, self._outcomes.now_s()))
        except Exception as error:  # it was well-formed and yet could not be dealt with
            self._outcomes.broke(self, error)

    def _on_exit(self, number: int, ending: Ending) -> None:
        late = self._crew.ended(number)
        self._settle()
        expected = self.session.phase is Phase.CLOSING
        self._outcomes.worker_exited(self, number, ending.how, expected)
        self._apply(self.session.event(number, Exited(ending, late), self._outcomes.now_s()))

    def tick(self, now_s: float) -> None:
        """See what has come by the passing of time alone."""
        self._guarded(partial(self._tick, now_s))

    def _tick(self, now_s: float) -> None:
        self._crew.tick(now_s)
        self._on_done_bell()  # a worker that is stopped, or lost its bell, may not have rung
        self._settle()
        self._apply(self.session.tick(now_s))

    def _ring_driver(self) -> None:
        client = self._memory is not None and self._driving.driver == DRIVER_CLIENT
        ring(self._memory.bells[0] if self._memory is not None and client else self._done_bell)

    # --- instructions -----------------------------------------------------------------------------------------------

    def _apply(self, instructions: Instructions) -> None:
        for instruction in instructions:
            match instruction:
                case Drive():
                    self._drive(instruction)
                case Answer():
                    self._answer(instruction)
                case _:
                    self._carry_out(instruction)
        if self.session.phase in _OVER:
            self._revoke()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case StartWorkers(numbers):
                self._start_workers(numbers)
            case Tell(number, message):
                self._crew.tell(number, message)
            case MapArena(number, message):
                self._map_arena(number, message)
            case TakeOver(number, outcome):
                self._crew.take_over(number, outcome)
            case HandOver(number, message):
                self._crew.hand_over(number, message)
            case Fail(failure):
                self._fail(failure)
            case MakeArena():
                self._make_arena(instruction)
            case LearnCost(cost):
                self._outcomes.learned(self, cost)
            case Notify(text):
                self._outcomes.notify(self, text)
            case Kill(number):
                if number in self._crew.processes:
                    self._crew.processes[number].kill()
            case End():
                self._watch.unwatch(self._done_bell)
                self._revoke()
                self._driving.close()
                self._crew.close()
                os.close(self._done_bell)
                if self._succession is not None:
                    self._succession.close()
                if self._memory is not None:
                    self._memory.close()
                    self._memory = None  # whoever keeps a view of it keeps it
                self._outcomes.ended(self)

    def _make_arena(self, instruction: MakeArena) -> None:
        layout, message = instruction.layout, instruction.message
        wanted, left = layout.nbytes(), self._outcomes.memory_left()
        batch = max((layout.batch_bytes(leaf) for leaf in layout.observations), default=0)
        reason = ""
        if wanted > left:
            reason = f"the session needs {wanted} bytes of shared memory, of arena_bytes_max {left} are left"
        if batch > FRAME_BYTES_MAX:
            reason = f"{batch} bytes of observations in a frame of each reply; at most {FRAME_BYTES_MAX} are sent"
        if reason:
            self._apply(self.session.event(-1, ArenaRefused(reason)))
            return
        try:
            self._memory = Memory(layout, len(self.session.blocks))
        except OSError as error:
            reason = f"{wanted} bytes of shared memory cannot be had: {error}"
            self._apply(self.session.event(-1, ArenaRefused(reason)))
            return
        if self.session.make.lost or self.session.make.fresh:
            self._memory.arena.needs_reset[:] = REPORT_PENDING if self.session.make.lost else FRESH
        self._crew.join(self._memory, instruction.loose, self._ring_driver)
        for number in range(len(self.session.blocks)):
            self._map_arena(number, message)

    def _map_arena(self, number: int, message: control.MapArena) -> None:
        self._crew.map_arena(number, message, self._done_bell)

    def _drive(self, drive: Drive) -> None:
        memory = self._memory
        assert memory is not None and self._request is not None
        frames, driver = memory.frames, memory.driver
        if drive.op == OP_STEP:
            driver.post(OP_OUT_OF_BAND if frames.has_beside else OP_STEP, frames.codes, frames.arrays)
            frames.arrays = ()  # which keep the whole message in memory
            if frames.has_beside:
                for number, rows in enumerate(self.session.blocks):
                    self._crew.tell(number, control.StepRows(frames.beside(rows)))
                self._crew.posted()
            else:
                self._crew.ring()
            self._passed_ns[:2] = self.heard_ns, time.monotonic_ns()
            return
        driver.post(drive.op)

    def _answer(self, answer: Answer) -> None:
        assert self._request is not None
        frames: list[Any] = []
        if self._memory is not None:
            if answer.arrays:
                infos = self.session.infos if self._noted else None
                frames = batch_frames(self._memory, self._sendable, self._request.op is Op.STEP, infos)
            elif answer.part is not None:
                frames = part_frames(self._memory, self._sendable, np.array(answer.part, np.int64), answer.rows)
            else:
                frames = row_frames(answer.rows)
        if frames and max(map(len, frames)) > FRAME_BYTES_MAX:
            text = f"infos or results of {max(map(len, frames))} bytes; a reply carries at most {FRAME_BYTES_MAX}"
            self._fail(Failure("limit", "hub", text))
            return
        if self._crew.told:
            self._crew.rest()
        if self._driving.lent:
            self._give_drive()
        message = replace(answer.message, ticket=self.ticket) if isinstance(answer.message, Made) else answer.message
        self._outcomes.answer(self._request, message, frames)
