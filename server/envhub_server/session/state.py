"""One session as a pure state machine: requests and worker events in, instructions out.

It knows no socket, process, memory or clock; the hub does what the instructions say and reports what came of it. One
request at a time is under way (the protocol sees to that), so the phases are few::

    BUILDING ──all Built──▶ MAPPING ──all Mapped──▶ READY ◀──▶ MOVING (reset, step)
                                                      ▲ ▼
                                                    CALLING (call, set_attr)

    BUILDING, MAPPING ──failure──▶ CLOSING        READY, MOVING, CALLING ──a worker died too often──▶ BROKEN
    any ──close, lease expired, hub stopping──▶ CLOSING ──all workers gone──▶ ended

Where it takes the first envs to see how many workers suit them, BUILDING begins with one env for each CPU; the workers
that make these go on, with as many others as are decided on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envhub.arena.layout import Layout
from envhub.arena.memory import OP_RESET, OP_STEP
from envhub.arena.spin import spin_us
from envhub.protocol import messages
from envhub.protocol.messages import (
    Call,
    Close,
    Collect,
    Failure,
    Made,
    Make,
    Receive,
    Reset,
    Send,
    SetAttr,
    Step,
    Templates,
    TemplatesRequest,
)
from envhub.values.info_columns import TEMPLATES_MAX
from envhub.values.leaf import Leaf
from envhub_server.catalog.registry import Recipe
from envhub_server.catalog.step_costs import average
from envhub_server.ipc import control
from envhub_server.ipc.reseeding import reseeded
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.session import failure_text
from envhub_server.session.build_order import build
from envhub_server.session.instructions import (
    Answer,
    ArenaRefused,
    Drive,
    End,
    Exited,
    Fail,
    HandOver,
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
from envhub_server.session.restarts import Restarts
from envhub_server.session.worker_count import Machine, WorkerCount, better_count, better_count_text, of_first_envs


class Phase(enum.Enum):
    """Where a session stands."""

    BUILDING = "building"
    MAPPING = "mapping"
    READY = "ready"
    MOVING = "moving"
    CALLING = "calling"
    BROKEN = "broken"
    CLOSING = "closing"


_STEP = Drive(OP_STEP)
_OUTCOME = Answer(messages.Done(), arrays=True)  # of a reset or a step


class SessionState:
    """One client's vector env.

    Attributes:
        phase: where it stands.
        blocks: the rows of each worker, in turn, so that slow envs that stand side by side are not all one worker's.
        infos: infos of the move under way that were too large for the arena.
        sizing: how many workers it has, and why; None until that is decided.
        spin_us: for how long its workers, and a client that drives them, look before they park.
        made: what is to be known of it, once it is made.
        mapped: what a worker is told with the arena.
    """

    def __init__(
        self,
        make: Make,
        recipe: Recipe,
        sizing: WorkerCount | None,
        info_bytes: int,
        machine: Machine,
        restarts: Restarts,
    ) -> None:
        """Of so many workers; where that is None, of as many as suit the first envs once they are made."""
        self.make = make
        self.phase = Phase.BUILDING
        self.sizing = sizing
        self._machine = machine
        self._first_built: dict[int, control.FirstBuilt] = {}
        self._step_times: dict[int, control.StepTimes] = {}
        self._warned = False  # that another number of workers would be better
        self._settle(machine.cpus if sizing is None else sizing.workers)
        self.infos: dict[int, bytes] = {}
        self._rows = range(make.num_envs)
        self._templates: dict[int, bytes] = {}
        self._recipe = recipe
        self._info_bytes = info_bytes
        self._waiting: set[int] = set()  # workers whose part of the phase is outstanding
        self._built: dict[int, control.Built] = {}
        self._standing: dict[int, int] = {}  # envs, by worker
        self._results: dict[int, list[bytes]] = {}
        self._calls = 0  # that were begun; the number of the last one, which answers to it repeat
        self._failure: Failure | None = None
        self._left: dict[int, Failure] = {}  # why rows failed that the hub did not drive, or not as a whole batch
        self.made: Made | None = None
        self._asked = True  # a request waits for its answer; the first one is the make
        self.mapped: control.MapArena | None = None  # what a worker is told when it gets the arena
        self._restarts = restarts
        self._away: dict[int, float] = {}  # when workers that ended are started again; until they serve
        self._boots: dict[int, Failure] = {}  # why they could not build their envs
        self._outcomes: dict[int, failure_text.Outcome] = {}
        self._seeds: list[int | None] = [None] * make.num_envs  # what each env was last seeded with

    @property
    def restarts(self) -> int:
        """How often its workers have ended, or made an env anew."""
        return sum(map(self._restarts.count, range(len(self.blocks))))

    @property
    def idle(self) -> bool:
        """Whether no request waits for its answer."""
        return not self._asked

    @property
    def making(self) -> bool:
        """Whether its envs do not stand yet."""
        return self.phase in (Phase.BUILDING, Phase.MAPPING)

    @property
    def building(self) -> messages.HeartbeatReply:
        """How far the making of the envs is."""
        return messages.HeartbeatReply("running", self.phase.value, sum(self._standing.values()), self.make.num_envs)

    # --- the life of a session ------------------------------------------------------------------------------------

    def start(self) -> Instructions:
        """What to do first."""
        self._waiting = set(self._alive)
        return [StartWorkers(tuple(range(len(self.blocks)))), *map(self._build, range(len(self.blocks)))]

    def _build(self, worker: int) -> Tell:
        cpu = self._machine.cpu(worker) if self.make.pin else None
        return Tell(worker, build(self.make, self._recipe, worker, self.blocks[worker], cpu, self.sizing is None))

    def _settle(self, workers: int) -> None:
        workers = max(1, min(workers, self.make.num_envs))
        self.blocks = _blocks(self.make.num_envs, workers)
        self._alive = set(range(workers))
        # Other sessions do not count: most are idle, and where they are not, spins are in vain and so become rare.
        machine, told_us = self._machine, self.make.spin_us
        self.spin_us = spin_us(workers + 1, machine.cpus, machine.quota) if told_us is None else told_us

    def close(self, terminate: bool = False) -> Instructions:
        """End the session.

        Call again with ``terminate`` once the time for closing is over.
        """
        first = self.phase is not Phase.CLOSING
        self.phase = Phase.CLOSING
        if terminate:
            return [Kill(worker) for worker in sorted(self._alive)] or self._ended()
        if not first:
            return []
        return [Tell(worker, control.CloseEnvs()) for worker in sorted(self._alive)] or self._ended()

    def abandon(self, why: Failure, terminate: bool) -> Instructions:
        """End the session without its client's wish; a request under way is told ``why``."""
        return [*self._answered(Fail(why)), *self.close(terminate)]

    def abstain(self, why: Failure) -> Instructions:
        """Refuse the request under way; nothing was done for it."""
        return self._answered(Fail(why))

    def _ended(self) -> Instructions:
        done = self._answered(Answer(messages.Done())) if self._failure is None else self._answered(Fail(self._failure))
        return [*done, End()]

    def _answered(self, answer: Answer | Fail) -> Instructions:
        if not self._asked:
            return []
        self._asked = False
        return [answer]

    # --- requests -------------------------------------------------------------------------------------------------

    def request(self, message: Any) -> Instructions:
        """What to do for the client's next request."""
        self._asked = True
        if isinstance(message, Close):
            self._failure = None  # what broke the session was told before; now only closing counts
            return self.close(message.terminate)
        if self.phase is Phase.BROKEN:
            assert self._failure is not None
            return self._answered(Fail(self._failure))
        if self.phase is not Phase.READY:
            return self._answered(Fail(_refusal(f"the session is {self.phase.value}")))
        if isinstance(message, (Send, Receive)):
            return []  # its host tells when it is carried out
        if isinstance(message, Collect):
            return self._collect(message.rows)
        if isinstance(message, TemplatesRequest):
            known = [number for number in message.numbers if number in self._templates]
            return self._answered(Answer(Templates(known, [self._templates[number] for number in known])))
        self._failure = None
        self._left.clear()
        self.infos.clear()
        match message:
            case Reset():
                return self._reset(message)
            case Step():
                self.phase = Phase.MOVING
                return [_STEP]
            case Call():
                wanted = control.CallRows(message.name, message.args, message.only_kind, message.skip_unreset)
                return self._call([wanted] * len(self.blocks))
            case SetAttr():
                return self._set_attr(message)
            case _:
                return self._answered(Fail(_refusal(f"a session does not carry out {type(message).__name__}")))

    def _collect(self, rows: list[int]) -> Instructions:
        # They are kept, for a client that was interrupted asks again; the next ones of a row take their place.
        failures = [self._left[row] for row in sorted(rows) if row in self._left]
        infos = tuple((row, self.infos[row]) for row in sorted(rows) if row in self.infos)
        return self._answered(Fail(failures[0]) if failures else Answer(messages.Done(), rows=infos))

    def _on_received(self, received: Received) -> Instructions:
        if received.raised is not None:
            unknown = Failure("internal", "session", f"env {received.raised} failed, and nobody said why")
            return self._answered(Fail(self._left.pop(received.raised, unknown)))
        large = [(row, self.infos.pop(row)) for row in received.large if row in self.infos]
        rows = tuple(sorted([*received.small, *large]))
        return self._answered(Answer(messages.Done(), rows=rows, part=received.rows))

    def _reset(self, reset: Reset) -> Instructions:
        num_envs = self.make.num_envs
        seeds, mask = reset.seeds or [None] * num_envs, reset.mask or [True] * num_envs
        if len(seeds) != num_envs or len(mask) != num_envs or not any(mask):
            return self._answered(Fail(_refusal(f"a reset needs {num_envs} seeds and a mask of {num_envs}, some True")))
        self.phase = Phase.MOVING
        self._seeds = [self._seeds[row] if seeds[row] is None or not mask[row] else seeds[row] for row in self._rows]
        instructions: Instructions = [Drive(OP_RESET)]
        for worker, block in enumerate(self.blocks):
            rows = [row for row in block if mask[row]]
            wanted = control.ResetRows(rows, [seeds[row] for row in rows], reset.options)
            instructions.append(Tell(worker, wanted))
        return instructions

    def _set_attr(self, wanted: SetAttr) -> Instructions:
        values = wanted.values
        if len(values) not in (1, self.make.num_envs):
            return self._answered(Fail(_refusal(f"set_attr needs 1 or {self.make.num_envs} values, got {len(values)}")))
        if len(values) == 1:
            return self._call([control.SetAttrRows(wanted.name, values[0])] * len(self.blocks))
        each = [[values[row] for row in block] for block in self.blocks]
        return self._call([control.SetAttrRows(wanted.name, each=part) for part in each])

    def _call(self, wanted: Sequence[control.CallRows | control.SetAttrRows]) -> Instructions:
        self.phase = Phase.CALLING
        self._calls += 1
        self._results.clear()
        self._waiting = set(range(len(self.blocks)))
        return [Tell(worker, replace(message, number=self._calls)) for worker, message in enumerate(wanted)]

    # --- events ---------------------------------------------------------------------------------------------------

    def event(self, worker: int, event: Any, now_s: float = 0.0) -> Instructions:
        """What to do now that ``worker`` sent this message, or that this happened."""
        match event:
            case control.Built():
                return self._on_built(worker, event)
            case control.Mapped():
                return self._on_mapped(worker, now_s)
            case control.Building(built):
                self._standing[worker] = built
                return []
            case control.FirstBuilt():
                return self._on_first_built(worker, event)
            case control.StepTimes():
                return self._on_step_times(worker, event)
            case control.RowInfo(row, info):
                if row in self.blocks[worker]:
                    self.infos[row] = info
                    self._left.pop(row, None)
                return []
            case control.InfoTemplate(number, example):
                if len(self._templates) < TEMPLATES_MAX * len(self.blocks):
                    self._templates[number] = example
                return []
            case Sent():
                return self._answered(Answer(messages.Done()))
            case Received():
                return self._on_received(event)
            case control.CallResults(values):
                self._results[worker] = values
                return self._on_called(worker)
            case control.RowFailed(failure) | control.CallFailed(failure):
                return self._on_failed(worker, failure)
            case ArenaRefused(reason):
                return self._make_failed(Failure("limit", "hub", reason))
            case control.Faulted(row, message):
                return self._on_faulted(worker, row, message, now_s)
            case Exited():
                return self._on_exited(worker, event, now_s)
            case control.Suspicious():
                return []
            case _:
                return self._make_failed(_refusal(f"worker {worker} sent a {type(event).__name__}"))

    def _on_first_built(self, worker: int, built: control.FirstBuilt) -> Instructions:
        """Decide on the number of workers, once the first env of each CPU is made, and have the other envs made."""
        if self.phase is not Phase.BUILDING or self.sizing is not None:
            return []
        self._first_built[worker] = built
        self._standing[worker] = 1
        if len(self._first_built) < len(self.blocks):
            return []
        self.sizing = of_first_envs(self.make.num_envs, self._first_built.values(), self._machine)
        begun = len(self.blocks)
        self._settle(self.sizing.workers)
        self._waiting = set(self._alive)
        others = range(begun, len(self.blocks))
        rest = [Tell(worker, control.BuildRest(self.blocks[worker])) for worker in range(begun)]
        return [*([StartWorkers(tuple(others))] if others else []), *rest, *map(self._build, others)]

    def _on_step_times(self, worker: int, times: control.StepTimes) -> Instructions:
        """Tell what steps of the env take, and, once, that another number of workers would suit them better."""
        self._step_times[worker] = times
        cost = average(self._step_times.values())
        if cost is None or self.sizing is None:
            return []
        learned: Instructions = [LearnCost(cost)]
        workers, num_envs = len(self.blocks), self.make.num_envs
        better = None if self._warned or self.sizing.told else better_count(num_envs, workers, cost, self._machine)
        if better is None:
            return learned
        self._warned = True
        return [*learned, Notify(better_count_text(num_envs, workers, *better, cost))]

    def _on_built(self, worker: int, built: control.Built) -> Instructions:
        if self.phase is not Phase.BUILDING:
            return [MapArena(worker, self.mapped)] if self.mapped is not None and worker in self._away else []
        self._built[worker] = built
        self._standing[worker] = len(self.blocks[worker])
        self._waiting.discard(worker)
        if self._waiting:
            return []
        first = self._built[0]
        try:
            observations, actions = (
                tuple(Leaf.from_wire(leaf) for leaf in leaves)
                for leaves in (first.observation_leaves, first.action_leaves)
            )
            layout = Layout(self.make.num_envs, observations, actions, self._info_bytes)
        except ValueError as error:
            return self._make_failed(Failure("limit", "hub", f"these envs have no place in shared memory: {error}"))
        self.mapped = control.MapArena(
            layout.rows,
            first.observation_leaves,
            first.action_leaves,
            layout.info_bytes,
            first.observation_spaces[0],
            first.action_space,
            self.make.observation_mode,
            self.spin_us,
        )
        self.phase = Phase.MAPPING
        self._waiting = set(self._alive)
        return [MakeArena(layout, self.mapped, first.loose)]

    def _on_mapped(self, worker: int, now_s: float) -> Instructions:
        self._restarts.serves(worker, now_s)
        if self.phase is not Phase.MAPPING:
            return [HandOver(worker, self._serve(worker))] if worker in self._away else []
        self._waiting.discard(worker)
        if self._waiting:
            return []
        self.phase = Phase.READY
        first = self._built[0]
        spaces = first.observation_spaces
        if self.make.observation_mode != "same":
            spaces = [
                self._built[row % len(self.blocks)].observation_spaces[row // len(self.blocks)] for row in self._rows
            ]
        made = Made(
            num_envs=self.make.num_envs,
            num_workers=len(self.blocks),
            observation_spaces=spaces,
            action_space=first.action_space,
            metadata=first.metadata,
            render_mode=first.render_mode,
            spec=first.spec,
            sizing="" if self.sizing is None else self.sizing.reason,
        )
        self.made = replace(made, autoreset_mode=self.make.autoreset_mode, observation_mode=self.make.observation_mode)
        self._built.clear()
        served: Instructions = [HandOver(worker, control.Serve(info=self.make.lost)) for worker in sorted(self._alive)]
        return [*served, *self._answered(Answer(made))]

    def moved(self) -> Instructions:
        """What to do now that the rows of the request under way are done."""
        if self.phase is not Phase.MOVING:
            return []
        self.phase = Phase.READY
        return self._answered(_OUTCOME if self._failure is None else Fail(self._failure))

    def _on_called(self, worker: int) -> Instructions:
        if self.phase is not Phase.CALLING:
            return []
        self._waiting.discard(worker)
        if self._waiting:
            return []
        self.phase = Phase.READY
        if self._failure is not None:
            return self._answered(Fail(self._failure))
        workers = len(self.blocks)
        pairs = tuple((row, self._results[row % workers][row // workers]) for row in self._rows)
        return self._answered(Answer(messages.Done(), rows=pairs))

    def _on_failed(self, worker: int, failure: Failure) -> Instructions:
        if self.phase in (Phase.BUILDING, Phase.MAPPING):
            return self._make_failed(failure)
        if worker in self._away and failure.code == "factory_failed":
            self._boots[worker] = failure
            return []
        if self.phase is Phase.READY:
            if failure.env_index in self.blocks[worker]:
                self._left[failure.env_index] = failure
                self.infos.pop(failure.env_index, None)
            return []
        if self._failure is None or (failure.env_index or 0) < (self._failure.env_index or 0):
            self._failure = failure  # of several, the first env's is told
        return self._on_called(worker)

    def _on_exited(self, worker: int, exited: Exited, now_s: float) -> Instructions:
        self._alive.discard(worker)
        if self.phase is Phase.CLOSING:
            return [] if self._alive else self._ended()
        if self.phase is Phase.BROKEN:
            return []
        told = failure_text.failure(worker, self.blocks[worker], exited.ending, exited.late)
        if self.phase in (Phase.BUILDING, Phase.MAPPING):
            text = f"{told.message} while it built its envs" if exited.late is None else told.message
            return self._make_failed(replace(told, message=text))
        return self._on_lost(worker, told, exited.ending, now_s)

    # --- workers that end while the session stands ------------------------------------------------------------------

    def _on_lost(self, worker: int, told: Failure, ending: ExitCause, now_s: float) -> Instructions:
        """Its rows are the hub's until another worker has taken its place, if one is to."""
        served = worker not in self._away
        if worker in self._boots:
            told = replace(told, message=f"{told.message}; before that: {self._boots.pop(worker).message}")
        delay_s = self._restarts.ended(worker, now_s)
        count = self._restarts.count(worker)
        if delay_s is None:
            return self._break(failure_text.exhausted(told, count))
        self._away[worker] = now_s + delay_s
        self._outcomes[worker] = failure_text.outcome(told, ending, count - 1, self.make.faults)
        taken: Instructions = [TakeOver(worker, self._outcomes[worker])]
        if self.phase is Phase.CALLING and served and worker in self._waiting:
            self._failure = self._failure or replace(told, message=f"{told.message} during a call")
            return [*taken, *self._on_called(worker)]
        return taken

    def _break(self, failure: Failure) -> Instructions:
        self._failure = failure
        self.phase = Phase.BROKEN
        return self._answered(Fail(failure))

    def _on_faulted(self, worker: int, row: int, message: str, now_s: float) -> Instructions:
        if self.phase in (Phase.CLOSING, Phase.BROKEN) or self._restarts.faulted(worker, now_s):
            return []
        told = Failure("worker_died", "request", f"env {row} raised {message}", env_index=row, worker=worker)
        return self._break(failure_text.exhausted(told, self._restarts.count(worker)))

    def tick(self, now_s: float) -> Instructions:
        """Start the workers whose time has come."""
        due = tuple(
            sorted(worker for worker, at_s in self._away.items() if at_s <= now_s and worker not in self._alive)
        )
        if not due or self.phase in (Phase.CLOSING, Phase.BROKEN):
            return []
        self._alive.update(due)
        return [StartWorkers(due), *map(self._build, due)]

    def _serve(self, worker: int) -> control.Serve:
        """What a worker is told that takes another one's place."""
        outcome = self._outcomes.pop(worker)
        del self._away[worker]
        self._boots.pop(worker, None)
        count = self._restarts.count(worker)
        seeds = [reseeded(self._seeds[row], count) for row in self.blocks[worker]]
        return control.Serve(seeds, outcome.failure if outcome.raises else None, outcome.info)

    def _make_failed(self, failure: Failure) -> Instructions:
        """The session cannot be made: say so, and end its workers at once."""
        answer = self._answered(Fail(failure))
        return [*answer, *self.close(terminate=True)]


def _refusal(message: str) -> Failure:
    return Failure("refused", "request", message)


def _blocks(rows: int, workers: int) -> list[list[int]]:
    return [list(range(worker, rows, workers)) for worker in range(workers)]
