"""What a session holds on this machine, its workers and its memory, and how its instructions are carried out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from envhub import actions, codec, messages
from envhub.arena import OP_STEP, Arena, allocate
from envhub.layout import Layout
from envhub.messages import Failure, Make
from envhub.protocol import FRAME_BYTES_MAX, Incoming
from envhub_server import control
from envhub_server.session import (
    Answer,
    ArenaRefused,
    Drive,
    End,
    Exited,
    Fail,
    Instruction,
    Instructions,
    Kill,
    MakeArena,
    Moved,
    Phase,
    Session,
    Tell,
)
from envhub_server.supervisor import Handlers, Supervisor, Watch, WorkerProcess


@dataclass(frozen=True)
class Outcomes:
    """What a host tells the hub."""

    answer: Callable[[Incoming, Any, Sequence[Any]], None]
    fail: Callable[[Incoming, Failure], None]
    worker_started: Callable[[Host, int, int], None]
    worker_exited: Callable[[Host, int, str, bool], None]
    ended: Callable[[Host], None]
    broke: Callable[[Host, Exception], None]
    memory_left: Callable[[], int]


class Host:
    """One session with everything it holds.

    Attributes:
        token: the session's.
        session: its state machine.
        close_by_s: when its workers are killed if they have not ended by themselves.
    """

    def __init__(
        self, token: bytes, session: Session, watch: Watch, supervisor: Supervisor, outcomes: Outcomes
    ) -> None:
        self.token = token
        self.session = session
        self.close_by_s: float | None = None
        self._watch = watch
        self._supervisor = supervisor
        self._outcomes = outcomes
        self._request: Incoming | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._arena: Arena | None = None
        self._slot = 0
        self._noted = False  # whether a row of the last move has something to say besides its arrays
        # Mostly every step's actions are of the same kind, so what follows from it is worked out when it changes.
        self._sized_codes = self._posted_codes = b""
        self._sizes: list[int] = []
        self._buffers: list[np.ndarray] = []
        self._beside = False  # whether parts of the actions travel beside the arrays
        self._parts: list[tuple[int, bytes]] = []  # those of a step's, by row
        self._done_bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        watch.watch(self._done_bell, self._on_done_bell)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return [worker.pid for worker in self._workers.values() if worker.pid is not None]

    @property
    def arena_bytes(self) -> int:
        """How much shared memory the session holds."""
        return 0 if self._arena is None else self._arena.layout.nbytes()

    # --- what the hub calls -----------------------------------------------------------------------------------------

    def start(self, request: Incoming, make: Make) -> None:
        """Start the workers and have them build the envs."""
        self._request = request
        environ = make.world.environ if make.world else None
        numbers = range(len(self.session.blocks))
        handlers = [
            Handlers(
                partial(self._on_message, number),
                partial(self._on_exit, number),
                partial(self._outcomes.worker_started, self, number),
            )
            for number in numbers
        ]
        try:
            self._workers = dict(enumerate(self._supervisor.start(handlers, environ)))
        except OSError as error:
            refusal = Failure("limit", "hub", f"a worker cannot be started: {error}")
            self._apply(self.session.abandon(refusal, terminate=True))
            for number in numbers:
                self._apply(self.session.event(number, Exited("was not started")))
            return
        self._apply(self.session.start())

    def request(self, request: Incoming) -> None:
        """Carry out the client's next request."""
        self._request = request
        if isinstance(request.message, messages.Step) and self._arena is not None:
            problem = self._step_problem(request.message.codes, request.frames)
            if problem:
                self._outcomes.fail(request, Failure("bad_actions", "request", problem))
                return
        self._apply(self.session.request(request.message))

    def abandon(self, why: Failure, terminate: bool = False) -> None:
        """End the session without its client's wish."""
        self._apply(self.session.abandon(why, terminate))

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_done_bell(self) -> None:
        os.read(self._done_bell, 8)
        arena = self._arena
        if arena is None or self.session.phase is not Phase.MOVING or not arena.quiescent():
            return
        self._noted = arena.noted()
        if self._noted:
            # What did not fit into the arena was sent by the channel before the rows were done, so it is here by now.
            for worker in list(self._workers.values()):
                while worker.hear():
                    pass
        self._apply(self.session.event(-1, Moved()))

    def _on_message(self, number: int, message: Any) -> None:
        try:
            self._apply(self.session.event(number, message))
        except Exception as error:  # it was well-formed and yet could not be dealt with
            self._outcomes.broke(self, error)

    def _on_exit(self, number: int, how: str) -> None:
        del self._workers[number]
        self._outcomes.worker_exited(self, number, how, self.session.phase is Phase.CLOSING)
        self._apply(self.session.event(number, Exited(how)))

    # --- instructions -----------------------------------------------------------------------------------------------

    def _apply(self, instructions: Instructions) -> None:
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Tell(number, message):
                if number in self._workers:  # else it has ended, as the session was or will be told
                    self._workers[number].tell(message)
            case Drive():
                self._drive(instruction)
            case Answer():
                self._answer(instruction)
            case Fail(failure):
                assert self._request is not None
                self._outcomes.fail(self._request, failure)
            case MakeArena(layout, message):
                self._make_arena(layout, message)
            case Kill(number):
                if number in self._workers:
                    self._workers[number].kill()
            case End():
                self._watch.unwatch(self._done_bell)
                os.close(self._done_bell)
                self._arena = None
                self._outcomes.ended(self)

    def _make_arena(self, layout: Layout, message: control.MapArena) -> None:
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
            memory = allocate(layout)
        except OSError as error:
            reason = f"{wanted} bytes of shared memory cannot be had: {error}"
            self._apply(self.session.event(-1, ArenaRefused(reason)))
            return
        self._arena = Arena(layout, memory)
        self._arena.format(epoch=1)
        for worker in self._workers.values():
            worker.map_arena(message, memory, self._done_bell)
        os.close(memory)

    def _step_problem(self, codes: bytes, frames: Sequence[Any]) -> str:
        """What is wrong with a step's frames; empty where they fit the arena."""
        assert self._arena is not None
        layout = self._arena.layout
        if len(codes) != len(layout.actions):
            return f"{len(codes)} codes for {len(layout.actions)} action leaves"
        if codes != self._sized_codes:
            try:
                sizes = actions.sizes(codes, layout.actions, layout.rows)
            except ValueError as error:
                return str(error)
            self._sized_codes, self._sizes, self._beside = codes, sizes, actions.BESIDE in codes
            with_array = zip(self._arena.actions, codes, strict=True)
            self._buffers = [buffer for buffer, code in with_array if code != actions.BESIDE]
        found = [len(frame) for frame in frames]
        if found[: len(self._sizes)] != self._sizes or len(found) != len(self._sizes) + self._beside:
            return f"action frames of {found} bytes where {self._sizes} are due; no env has moved"
        return self._beside_problem(frames[-1]) if self._beside else ""

    def _beside_problem(self, frame: Any) -> str:
        assert self._arena is not None
        try:
            self._parts = messages.unpack_rows(frame, self._arena.layout.rows)
        except codec.DecodeError as error:
            return f"{error}; no env has moved"
        complete = [row for row, _ in self._parts] == list(range(self._arena.layout.rows))
        return "" if complete else "the actions beside the arrays are not one for each row; no env has moved"

    def _drive(self, drive: Drive) -> None:
        arena = self._arena
        assert arena is not None and self._request is not None
        self._slot = 1 - self._slot
        if drive.op == OP_STEP:
            for buffer, frame in zip(self._buffers, self._request.frames):  # noqa: B905  what is beside comes last
                buffer.data[: len(frame)] = frame
            if drive.codes != self._posted_codes:
                self._posted_codes = drive.codes
                for column, code in zip(arena.action_codes, drive.codes, strict=True):
                    column[:] = code
            arena.post(OP_STEP, self._slot)
            if self._beside:
                for number, worker in self._workers.items():
                    block = self.session.blocks[number]
                    worker.tell(control.StepRows(messages.pack_rows(self._parts[block[0] : block[-1] + 1])))
                self._parts = []
                return
            for worker in self._workers.values():
                worker.ring()
            return
        arena.post(drive.op, self._slot)

    def _answer(self, answer: Answer) -> None:
        assert self._request is not None
        frames: list[Any] = []
        blobs: list[tuple[int, Any]] = list(answer.rows)
        if answer.arrays:
            arena = self._arena
            assert arena is not None
            # Views, not copies: this slot is written again only at the request after the next.
            frames += [leaf[self._slot] for leaf in arena.observations]
            if isinstance(self._request.message, messages.Step):
                frames.append(arena.results.tobytes())
            if self._noted:
                blobs = sorted([*arena.small_infos(), *self.session.infos.items()], key=lambda pair: pair[0])
        if blobs:
            frames.append(messages.pack_rows(blobs))
            if len(frames[-1]) > FRAME_BYTES_MAX:
                text = f"infos or results of {len(frames[-1])} bytes; a reply carries at most {FRAME_BYTES_MAX}"
                self._outcomes.fail(self._request, Failure("limit", "hub", text))
                return
        self._outcomes.answer(self._request, answer.message, frames)
