"""Sessions in the states that tests begin with, and what their workers say. After each event they are validated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from envhub_server.catalog.registry import Recipe
from envhub_server.ipc.control import Built, Closing, Mapped
from envhub_server.processes.worker_handle import ExitCause, WorkerExited, WorkerMessage
from envhub_server.session.launcher import Launcher, Machine, Restarts, WorkerCount, WorkerRules
from envhub_server.session.machine import SessionMachine
from envhub_server.session.slots import SAMPLE_S, Progress, Slot, Stage
from envhub_server.session.state import HANDLERS, MAKING, OVER, SERVING, TRANSITIONS, Driver, Phase
from recorder import Answer, Effect, Recorder, Tell, events

from envhub.protocol.messages import Done, Failure, Make, Send

NO_RULES = WorkerRules()
MACHINE = Machine((0, 1, 2, 3), 4, quota=True)  # with which nobody spins
OBSERVATION, WIDER, ACTION = b"a space", b"a wider one of the same leaves", b"actions"
INFO_BYTES = 64
RECIPE = Recipe("CartPole-v1")
RAISED = Failure("env_raised", "env", "no", env_index=1, worker=0)
SHUTTING_DOWN = Failure("draining", "hub", "the hub is shutting down")
KILLED = ExitCause("was ended by SIGKILL", "SIGKILL", log_tail="its last words")


class Session(SessionMachine):
    """A state machine that is validated after each event.

    Every change of its phase must be one that is declared.
    """

    effects: Recorder

    def __init__(
        self,
        make: Make,
        recipe: Recipe,
        count: WorkerCount | None,
        info_bytes: int,
        machine: Machine,
        restarts: Restarts,
        rules: WorkerRules = NO_RULES,
    ) -> None:
        super().__init__(Launcher(make, recipe, rules, machine, restarts, Recorder()), count, info_bytes)

    def handle(self, event: Any, now_s: float = 0.0) -> list[Effect]:
        """Tell the session what has happened; the calls of its effects."""
        before, name = self.phase, self.tell(event, now_s)
        validate(self)
        declared = TRANSITIONS.get(name, {}).get(before, ())
        draining = (Phase.CLOSING, Phase.ENDED)  # which may follow anything, once the hub shuts down
        assert self.phase in (before, *declared, *draining), f"{name} in {before} led to {self.phase}"
        calls, self.effects.calls = self.effects.calls, []
        return calls

    def tell(self, event: Any, now_s: float) -> str:
        """Effect the method of an event; its name, or that of the one that handles a message."""
        handler = HANDLERS.get(type(getattr(event, "message", None)), {}).get(self.phase)
        if isinstance(event, WorkerExited):
            self.on_exited(now_s, event)
            return "on_exited"
        if isinstance(event, WorkerMessage):
            self.on_message(now_s, event)
        else:
            getattr(self, event.method)(now_s, *vars(event).values())
        return getattr(event, "method", "") if handler is None else handler.__name__

    def number(self, worker: int) -> int:
        """The number of the process that serves this slot, or is to; that of a spare is its own."""
        process = self.slots[worker].process if worker < len(self.slots) else None
        return worker if process is None else process.number

    def worker_sent(self, worker: int, message: Any, now_s: float = 0.0) -> list[Effect]:
        return self.handle(WorkerMessage(self.number(worker), message), now_s)

    def exited(self, worker: int, cause: ExitCause = KILLED, now_s: float = 0.0) -> list[Effect]:
        return self.ended(self.number(worker), cause, now_s)

    def ended(self, process: int, cause: ExitCause = KILLED, now_s: float = 0.0) -> list[Effect]:
        """What is done about the end of the process of this number, which may serve no slot."""
        return self.handle(WorkerExited(process, cause), now_s)

    def closes(self, process: int, *rows: int, now_s: float = 0.0) -> None:
        """The process of this number says which rows it closes now; without any it has closed all."""
        assert self.handle(WorkerMessage(process, Closing([*rows])), now_s) == []

    def closed(self, process: int, now_s: float = 0.0) -> list[Effect]:
        """What is done once the process of this number has closed its envs and ended."""
        self.closes(process, now_s=now_s)
        return self.ended(process, ExitCause("exited with status 0"), now_s)

    def request(self, message: Any, quiescent: bool = True, now_s: float = 0.0) -> list[Effect]:
        return self.handle(events.Request(message, quiescent), now_s)

    def sends(self, *rows: int) -> None:
        """Have a partial batch of these rows posted."""
        assert self.request(Send([*rows], b"\x04"))[-1:] == [Answer(Done())]

    def replaced(self, worker: int = 0, now_s: float = 1e9) -> list[Effect]:
        """What is done once a new process serves the rows of a worker that has ended."""
        self.elapsed(now_s)
        self.worker_sent(worker, built(), now_s)
        return self.worker_sent(worker, Mapped(), now_s)

    def rows_done(self) -> list[Effect]:
        return self.handle(events.RowsDone())

    def elapsed(
        self,
        now_s: float,
        *progress: Progress | None,
        quiescent: bool = True,
        memory: Mapping[int, int] = MappingProxyType({}),
    ) -> list[Effect]:
        found = progress or (None,) * len(self.slots)
        return self.handle(events.Elapsed(quiescent, found, memory), now_s)

    def sampled(self, begin_s: float, end_s: float, *progress: Progress | None, quiescent: bool = True) -> list[Effect]:
        """What is done in the samples after ``begin_s``, which are as often as planned, up to ``end_s``."""
        calls: list[Effect] = []
        for number in range(round((end_s - begin_s) / SAMPLE_S)):
            now_s = begin_s + (number + 1) * SAMPLE_S
            calls += self.elapsed(now_s, *progress, quiescent=quiescent)
        return calls


def every(kind: type[Effect], calls: Iterable[Effect]) -> list[Any]:
    """The calls of this kind, whatever comes between them."""
    return [each for each in calls if isinstance(each, kind)]


def only(kind: type[Effect], calls: Iterable[Effect]) -> Any:
    """The one call of this kind, whatever comes before and after it."""
    (found,) = every(kind, calls)
    return found


def only_tell(kind: type, calls: Iterable[Effect]) -> Any:
    """The one call that tells a process a message of this kind, whatever comes before and after it."""
    (found,) = (each for each in every(Tell, calls) if isinstance(each.message, kind))
    return found


def validate(state: SessionMachine) -> None:
    """Check what always holds between two events."""
    asked, slots = state.requests.pending_reply, state.slots
    assert sorted(row for slot in slots for row in slot.rows) == [*range(state.make.num_envs)]
    assert asked or state.phase is not Phase.MOVING
    assert asked or state.takeover_pending or state.phase not in MAKING
    assert state.driver is Driver.HUB or not state.requests.rows_out
    assert state.takeover_pending or state.let_go_by_s == math.inf
    assert not state.requests.waiting or state.requests.rows_out
    assert state.requests.failure is not None or state.phase is not Phase.BROKEN
    assert state.phase is not Phase.ENDED or not (asked or slots.processes)
    assert state.phase is not Phase.CLOSING or slots.processes
    spares = state.replacement.spares
    # One more may be made to recycle a worker, which a restore may replace meanwhile; one that is over replaces none.
    more = len(slots) if state.make.snapshots else 1
    assert state.phase in OVER or spares.unused <= spares.wanted + more
    assert len({process.number for process in slots.processes}) == len(slots.processes)
    for number, spare in slots.spares.items():
        assert number == spare.number and slots.of(spare) is None
        stages = (Stage.MAPPING, Stage.MAPPED) if spare.is_restored else (Stage.BUILDING, Stage.BUILT)
        assert spare.stage in (*stages, Stage.LEAVING)
    for slot in slots:
        validate_slot(state, slot)


def validate_slot(state: SessionMachine, slot: Slot) -> None:
    process = slot.process
    assert process is None or (process.slot_index == slot.index and process.stage is not Stage.LEAVING)
    assert slot.serving is None or (slot.loss is None and slot.serving.made is None)
    if state.phase in SERVING:
        assert (slot.loss is None) == (slot.serving is not None)
        assert process is not None or slot.restart_at_s < math.inf


def restarts(restarts_max: int = 5) -> Restarts:
    return Restarts(restarts_max, 1, lambda low, high: 0.0)


def built(*observations: bytes) -> Built:
    return Built(
        list(observations or [OBSERVATION]),
        ACTION,
        [["<f4", [4]]],
        [["<i8", []]],
        b"meta",
        "rgb_array",
        "{}",
        may_share_process=True,
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
    session.handle(events.Made())
    return session


def ready(num_envs: int = 3, workers: int = 2, **make: Any) -> Session:
    """A session that is made, idle."""
    session = begun(num_envs, workers, **make)
    for worker in range(len(session.slots)):
        session.worker_sent(worker, built())
    for worker in range(len(session.slots)):
        session.worker_sent(worker, Mapped())
    assert session.phase is Phase.READY and not session.requests.pending_reply
    return session


def shared(num_envs: int = 3, workers: int = 2, **make: Any) -> Session:
    """A session whose client drives."""
    session = ready(num_envs, workers, **make)
    session.handle(events.SideConnected(quiescent=True))
    return session
