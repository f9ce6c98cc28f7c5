"""Sessions in the states that tests begin with, and what their workers say. After each stimulus they are validated."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from envhub_server.catalog.registry import Recipe
from envhub_server.ipc.control import Built, CallFailed, CallResults, Closing, Mapped
from envhub_server.processes.worker_events import ExitCause, WorkerExited, WorkerSaid
from envhub_server.session import stimuli
from envhub_server.session.build_order import WorkerRules
from envhub_server.session.deadlines import SAMPLE_S
from envhub_server.session.hang_detector import Progress
from envhub_server.session.instructions import Instruction, Instructions, Tell
from envhub_server.session.machine import SessionMachine
from envhub_server.session.phases import MAKING, OVER, SERVING, Driver, Phase
from envhub_server.session.restarts import Restarts
from envhub_server.session.slots import Slot, Stage
from envhub_server.session.table import TABLE
from envhub_server.session.worker_count import Machine, WorkerCount

from envhub.protocol.messages import Failure, Make

MACHINE = Machine((0, 1, 2, 3), 4, quota=True)  # with which nobody spins
OBSERVATION, WIDER, ACTION = b"a space", b"a wider one of the same leaves", b"actions"
INFO_BYTES = 64
RECIPE = Recipe("CartPole-v1")
RAISED = Failure("env_raised", "env", "no", env_index=1, worker=0)
SHUTTING_DOWN = Failure("draining", "hub", "the hub is shutting down")
KILLED = ExitCause("was ended by SIGKILL", "SIGKILL", log_tail="its last words")


class Session(SessionMachine):
    """A state machine that is asked by its stimuli only, and validated after each.

    Every change of its phase must be one that the table declares.
    """

    def handle(self, stimulus: Any, now_s: float = 0.0) -> Instructions:
        before, kind = self.phase, type(stimulus)
        if isinstance(stimulus, (stimuli.Requested, WorkerSaid)):
            kind = type(stimulus.message)
        instructions = super().handle(stimulus, now_s)
        assert isinstance(instructions, list), "the hub carries out a list, however short"
        validate(self)
        rule = TABLE.get(kind, {}).get(before)
        declared = () if rule is None else rule.following
        draining = (Phase.CLOSING, Phase.ENDED)  # which may follow anything, once the hub shuts down
        assert self.phase in (before, *declared, *draining), f"{kind.__name__} in {before} led to {self.phase}"
        return instructions

    def number(self, worker: int) -> int:
        """The number of the process that serves this slot, or is to; that of a spare is its own."""
        process = self.slots[worker].process if worker < len(self.slots) else None
        return worker if process is None else process.number

    def said(self, worker: int, message: Any, now_s: float = 0.0) -> Instructions:
        """A call's answer repeats its number."""
        if isinstance(message, (CallResults, CallFailed)) and not message.number:
            message = replace(message, number=self.calls.number)
        return self.handle(WorkerSaid(self.number(worker), message), now_s)

    def exited(self, worker: int, cause: ExitCause = KILLED, now_s: float = 0.0) -> Instructions:
        return self.ended(self.number(worker), cause, now_s)

    def ended(self, process: int, cause: ExitCause = KILLED, now_s: float = 0.0) -> Instructions:
        """What is done about the end of the process of this number, which may serve no slot."""
        return self.handle(WorkerExited(process, cause), now_s)

    def closes(self, process: int, *rows: int, now_s: float = 0.0) -> None:
        """The process of this number says which rows it closes now; without any it has closed all."""
        assert self.handle(WorkerSaid(process, Closing([*rows])), now_s) == []

    def closed(self, process: int, now_s: float = 0.0) -> Instructions:
        """What is done once the process of this number has closed its envs and ended."""
        self.closes(process, now_s=now_s)
        return self.ended(process, ExitCause("exited with status 0"), now_s)

    def request(self, message: Any, quiescent: bool = True, now_s: float = 0.0) -> Instructions:
        return self.handle(stimuli.Requested(message, quiescent), now_s)

    def rows_done(self) -> Instructions:
        return self.handle(stimuli.RowsDone())

    def elapsed(
        self,
        now_s: float,
        *progress: Progress | None,
        quiescent: bool = True,
        memory: Mapping[int, int] = MappingProxyType({}),
    ) -> Instructions:
        found = progress or (None,) * len(self.slots)
        return self.handle(stimuli.Elapsed(quiescent, found, memory), now_s)

    def sampled(
        self, begin_s: float, end_s: float, *progress: Progress | None, quiescent: bool = True
    ) -> list[Instruction]:
        """What is done in the samples after ``begin_s``, which are as often as planned, up to ``end_s``."""
        instructions: list[Instruction] = []
        for number in range(round((end_s - begin_s) / SAMPLE_S)):
            now_s = begin_s + (number + 1) * SAMPLE_S
            instructions += self.elapsed(now_s, *progress, quiescent=quiescent)
        return instructions


Kind = TypeVar("Kind", bound=Instruction)


def every(kind: type[Kind], instructions: Iterable[Instruction]) -> list[Kind]:
    """The instructions of this kind, whatever comes between them."""
    return [each for each in instructions if isinstance(each, kind)]


def only(kind: type[Kind], instructions: Iterable[Instruction]) -> Kind:
    """The one instruction of this kind, whatever comes before and after it."""
    (found,) = every(kind, instructions)
    return found


def only_tell(kind: type, instructions: Iterable[Instruction]) -> Tell:
    """The one instruction that tells a process a message of this kind, whatever comes before and after it."""
    (found,) = (each for each in every(Tell, instructions) if isinstance(each.message, kind))
    return found


def validate(state: SessionMachine) -> None:
    """Check what always holds between two stimuli."""
    ownership, asked, slots = state.ownership, state.requests.asked, state.slots
    assert sorted(row for slot in slots for row in slot.rows) == [*range(state.make.num_envs)]
    assert asked or state.phase not in (Phase.MOVING, Phase.CALLING)
    assert asked or ownership.claimed or state.phase not in MAKING
    assert ownership.driver is Driver.HUB or not state.partial_batches.rows_out
    assert ownership.claimed or ownership.let_go_by_s == math.inf
    assert not state.partial_batches.receiving or asked
    assert state.requests.failure is not None or state.phase is not Phase.BROKEN
    assert state.phase is not Phase.ENDED or not (asked or slots.alive)
    assert state.phase is not Phase.CLOSING or slots.alive
    assert (
        state.replacement.spares.unused <= state.replacement.spares.wanted + 1
    )  # one that is made to recycle a worker
    assert len({process.number for process in slots.processes}) == len(slots.processes)
    for number, spare in slots.spares.items():
        assert number == spare.number and slots.of(spare) is None
        assert spare.stage in (Stage.BUILDING, Stage.BUILT, Stage.LEAVING)
    for slot in slots:
        validate_slot(state, slot)


def validate_slot(state: SessionMachine, slot: Slot) -> None:
    process, phase = slot.process, state.phase
    assert process is None or (process.place == slot.index and process.stage is not Stage.LEAVING)
    assert slot.serving is None or (slot.loss is None and slot.serving.made is None)
    if phase in SERVING:
        assert (slot.loss is None) == (slot.serving is not None)
        assert process is not None or slot.restart_at_s < math.inf
    if phase not in (*MAKING, Phase.CALLING, *OVER):
        assert not slot.waiting and (state.requests.asked or slot.pending is None)


class Steady(random.Random):
    """No delay is longer or shorter by it."""

    def uniform(self, a: float, b: float) -> float:
        return 0.0


def restarts(restarts_max: int = 5) -> Restarts:
    return Restarts(restarts_max, 1, Steady())


def built(*observations: bytes) -> Built:
    return Built(
        list(observations or [OBSERVATION]), ACTION, [["<f4", [4]]], [["<i8", []]], b"meta", "rgb_array", "{}", fit=True
    )


def session_of(make: Make, workers: int | None, recipe: Recipe = RECIPE, restarts_max: int = 5) -> Session:
    """A session of so many workers; where that is None, its first envs decide."""
    sizing = None if workers is None else WorkerCount(workers, "as the test wants it")
    rules = WorkerRules(hosting=make.hosting)
    return Session(make, recipe, sizing, INFO_BYTES, MACHINE, restarts(restarts_max), rules)


def begun(num_envs: int = 3, workers: int = 2, recipe: Recipe = RECIPE, **make: Any) -> Session:
    """A session whose workers are building."""
    made = Make(num_envs, "CartPole-v1", **make)
    session = session_of(made, workers, recipe, restarts_max=made.faults.restarts_max)
    session.handle(stimuli.SessionMade())
    return session


def ready(num_envs: int = 3, workers: int = 2, **make: Any) -> Session:
    """A session that is made, idle."""
    session = begun(num_envs, workers, **make)
    for worker in range(len(session.slots)):
        session.said(worker, built())
    for worker in range(len(session.slots)):
        session.said(worker, Mapped())
    assert session.phase is Phase.READY and not session.requests.asked
    return session


def shared(num_envs: int = 3, workers: int = 2, **make: Any) -> Session:
    """A session whose client drives."""
    session = ready(num_envs, workers, **make)
    session.handle(stimuli.SideConnected(quiescent=True))
    return session
