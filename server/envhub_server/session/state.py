"""One session as a pure state machine: stimuli in, instructions out.

It knows no socket, process, memory or clock. ``hub.runtime`` carries out the instructions in their order and reports
what came of them as further stimuli, after the machine has returned: it is never re-entered. It decides everything that
is decided about a session: which requests are carried out, who drives, what is told of a worker that ended and when
another takes its place, which env hangs, how another client takes over, and when the session ends.

One request at a time is under way (the protocol sees to that). ``TABLE`` says which stimulus is handled in which phase,
and which phases may follow; ``diagram`` draws them.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from envhub.arena.layout import split_share, whole_shares
from envhub.arena.spin import spin_us
from envhub.env_failure import EnvFailure
from envhub.protocol import messages
from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import (
    Call,
    Close,
    Collect,
    Failure,
    HopsRequest,
    Make,
    Receive,
    Reset,
    Send,
    SetAttr,
    Step,
    Templates,
    TemplatesRequest,
)
from envhub.values import codec
from envhub.values.info_columns import EXAMPLE_BYTES_MAX, TEMPLATES_MAX
from envhub.values.leaf import ANYTHING, OBJECT
from envhub_server.catalog.registry import Recipe
from envhub_server.catalog.step_costs import StepCost, average, key
from envhub_server.ipc import control
from envhub_server.ipc.journal import name_of_raised
from envhub_server.ipc.reseeding import reseeded
from envhub_server.ipc.set_attributes import SetAttributes
from envhub_server.ipc.shared_libraries import shared
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.processes.worker_events import WorkerExited, WorkerSaid
from envhub_server.session import failure_text, stimuli
from envhub_server.session import instructions as do
from envhub_server.session.build_order import NO_RULES, Place, WorkerRules, build, build_rest, variables
from envhub_server.session.failure_text import Overrun, WorkerLoss
from envhub_server.session.hang_detector import HangDetector, Late, Progress
from envhub_server.session.instructions import Instructions
from envhub_server.session.restarts import Restarts
from envhub_server.session.stimuli import Requested, Stimulus
from envhub_server.session.worker_count import (
    Machine,
    WorkerCount,
    better_count,
    better_count_text,
    crowded_text,
    of_first_envs,
    separate,
    shared_text,
)

SAMPLE_S = 0.1  # how often the arena is read while envs are at work
MEMORY_S = 0.2  # how often the workers' memory is measured, where it has a limit
SPARE_RETRY_S = 1.0  # before another spare is made in place of one that ended, and twice as long each time in a row
SPARE_RETRY_MAX_S = 60.0
SAMPLE_IDLE_S = 1.0  # while the client drives and does not step
KEPT_TEMPLATES_MAX = 2 * TEMPLATES_MAX  # of a worker: those of its process, and as many of the ones before it
SECOND_FAILED = "a second env could not be made in its process"
HISTORY_MAX = 100  # stimuli that are logged with an internal error
NO_TURN = -1  # in place of a progress word, while the worker maps an arena
STACKS_S = 1.0  # for a worker on a busy machine to write where its threads are, before it is killed

_CALLS = (control.CallRows, control.SetAttrRows)


class Phase(enum.Enum):
    """Where a session stands."""

    __hash__ = object.__hash__  # an enum's own is a Python function, and every stimulus is looked up by its phase

    BUILDING = "building"  # its workers make the envs
    MAPPING = "mapping"  # they map the arena
    READY = "ready"  # no request of the whole batch is under way
    MOVING = "moving"  # a reset or step is under way
    CALLING = "calling"  # a call is under way
    HANDING_OVER = "handing over"  # its workers move to the arena of the client that takes it over
    BROKEN = "broken"  # a worker has ended too often
    CLOSING = "closing"  # its workers close the envs and end
    ENDED = "ended"


_MAKING = (Phase.BUILDING, Phase.MAPPING)
_OVER = (Phase.BROKEN, Phase.CLOSING, Phase.ENDED)


class Stage(enum.Enum):
    """Where a worker stands."""

    ABSENT = "absent"  # no process: it was not asked for yet, or has ended
    BUILDING = "building"  # its process makes its envs
    BUILT = "built"  # its envs exist, and it waits for the arena
    MAPPING = "mapping"  # it was given the arena
    MAPPED = "mapped"  # it waits for its rows
    SERVING = "serving"  # its rows are its own
    LEAVING = "leaving"  # another worker has taken over, and it closes its envs


class LaneName(enum.Enum):
    """How the client steps the session."""

    WIRE = "wire"  # the hub drives, for each step
    SHARED = "shared"  # the client may drive, and does whenever nothing that the hub drives is under way


class Driver(enum.Enum):
    """Who posts rows."""

    HUB = "hub"
    CLIENT = "client"


class Takeover(enum.Enum):
    """Whether another client takes the session over."""

    NONE = "none"
    WAITING = "waiting"  # for the rows under way
    MOVING = "moving"  # of the workers to another arena


@dataclass
class WorkerState:
    """What is known of one worker.

    Attributes:
        rows: its rows.
        detector: judges its progress.
        stage: where it stands.
        built: how many envs its process has made.
        loss: what its rows are told of the process that ended, until another one serves.
        restart_at_s: when a process is started again.
        boot_failure: why its last process could not make the envs.
        waiting: whether its part of the phase is outstanding.
        pending: its message of the request under way, which its next process is told again if this one ends.
        results: of the call under way, by row.
        late: the env for which it is about to be killed, at ``kill_at_s``.
        overrun: how much memory it had, if it was killed for that.
        serves_since_s: when it began to serve.
        recycled: how often another worker took over.
        worn: whether another worker is to take over once its envs are between episodes.
        overdue: whether it is to take over in the middle of their episodes, too.
        nbytes: how much memory it had, when that was measured last.
        leaves_since_s, leaves_bytes: when it was told to leave between episodes, and how much memory it had then.
        finish_at_s: when steps that wait for its next process have waited for long enough.
        moving: whether it was given the second arena and has not mapped it yet.
        shares: whether its process has the session's libraries from its zygote.
        imported: whether it has loaded what makes its envs.
        again: whether its next process makes its envs: without shared libraries, or one env only.
        first, made, times: what it said of its first env, of all its envs, and of their steps.
        templates: the examples of the forms of infos that its processes announced last, by number, oldest first.
    """

    rows: list[int]
    detector: HangDetector
    stage: Stage = Stage.ABSENT
    built: int = 0
    importing: str = ""  # modules, before it makes its first env
    loss: WorkerLoss | None = None
    restart_at_s: float = math.inf
    boot_failure: Failure | None = None
    waiting: bool = False
    pending: Any = None
    results: Sequence[tuple[int, bytes]] = ()
    late: Late | None = None
    kill_at_s: float = math.inf
    overrun: Overrun | None = None
    serves_since_s: float = math.inf
    recycled: int = 0
    worn: bool = False
    overdue: bool = False
    nbytes: int = 0
    leaves_since_s: float = math.inf
    leaves_bytes: float = math.inf
    finish_at_s: float = math.inf
    moving: bool = False
    shares: bool = False
    imported: bool = False
    again: bool = False
    first: control.FirstBuilt | None = None
    made: control.Built | None = None
    times: control.StepTimes | None = None
    templates: dict[int, bytes] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether it has a process."""
        return self.stage is not Stage.ABSENT

    def start(self) -> None:
        """Note that a process is asked for."""
        self.stage, self.built, self.restart_at_s, self.imported = Stage.BUILDING, 0, math.inf, False

    @property
    def killed_for(self) -> Late | Overrun | None:
        """Why the hub kills the process; None if it does not."""
        return self.late or self.overrun

    def end(self) -> Late | Overrun | None:
        """Note that the process has ended; returns why it was killed, if it was."""
        why = self.killed_for
        self.late = self.overrun = None
        self.stage, self.kill_at_s, self.moving = Stage.ABSENT, math.inf, False
        self.detector.rest()
        return why

    def as_spare(self, place: int) -> Spare:
        """The process of this worker, whose place another one takes; what is known of it goes along."""
        found = Spare(self.rows, self.detector, self.stage, self.built, place=place)
        found.late, found.kill_at_s, found.overrun = self.late, self.kill_at_s, self.overrun
        self.late, self.kill_at_s, self.overrun = None, math.inf, None
        return found


@dataclass
class Spare(WorkerState):
    """A worker that is made ahead, and serves no rows until it takes the place of another.

    Attributes:
        place: the worker whose place it was made for; its rows are as many as that one's.
        successor: whether it takes that worker's place as soon as the envs there are between episodes.
    """

    place: int = 0
    successor: bool = False


class SessionState:
    """One vector env, of one client at a time.

    Attributes:
        make: what the client asked for.
        recipe: of its envs, with what the operator has set for them.
        rules: what holds for all of its workers.
        phase: where the session stands.
        workers: by number; worker ``i`` of ``n`` has every row whose remainder is ``i``, so that slow envs that stand
            side by side are not all one worker's.
        spares: by number, from the number of workers on; no number is used twice.
        asked: whether a request waits for its answer.
        lane: how the client steps it.
        driver: who posts rows.
        infos: infos of the request under way that were too large for the arena.
        sizing: how many workers it has, and why; None until that is decided.
        worker_spin_us: for how many microseconds each of its workers spins before it parks.
        driver_spin_us: for how many its driver does.
        made: what the client is told of it, once it is made.
        history: the last stimuli, by their classes, for the log: what they carry may be large.
    """

    def __init__(
        self,
        make: Make,
        recipe: Recipe,
        sizing: WorkerCount | None,
        info_bytes: int,
        machine: Machine,
        restarts: Restarts,
        rules: WorkerRules = NO_RULES,
    ) -> None:
        """Of ``sizing`` workers; where that is None, of as many as suit the first envs once these are made."""
        self.make = make
        self.recipe = recipe
        self.rules = rules
        self.phase = Phase.BUILDING
        self.sizing = sizing
        self.workers: list[WorkerState] = []
        self.spares: dict[int, Spare] = {}
        self.asked = True  # the first request is the make
        self.lane = LaneName.WIRE
        self.driver = Driver.HUB
        self.infos: dict[int, bytes] = {}
        self.made: messages.Made | None = None
        self.worker_spin_us = self.driver_spin_us = 0
        self.history: deque[type] = deque(maxlen=HISTORY_MAX)
        self._info_bytes = info_bytes
        self._machine = machine
        self._restarts = restarts
        self._sharing_tried = False  # whether a worker that shares libraries has made its envs
        self._separated = False  # whether its envs have a process each since a second one could not be made in one
        self._warned = False  # that another number of workers would be better
        self._fit = False  # whether its envs are known to be fit to share a process
        self._shared_told = False  # whether its client knows that they change what a process shares
        self._map_message: control.MapArena | None = None  # what a worker is told with the arena
        self._calls = 0  # the number of the last call, which its answers repeat
        self._failure: Failure | None = None  # of the request under way, or of the session
        self._uncollected: dict[int, Failure] = {}  # by row, for COLLECT and RECEIVE
        self._seeds: list[int | None] = [None] * make.num_envs  # the last seed of each env
        self._attributes = SetAttributes()
        self._parts_out = 0  # rows that were posted by SEND and not received
        self._receiving = 0  # how many of them RECEIVE waits for
        self._takeover = Takeover.NONE
        self._lent = False  # whether a client has ever had the arena's memory
        self._close_by_s = self._drain_by_s = self._end_by_s = math.inf  # the last two once the hub shuts down
        self._sample_at_s = math.inf
        self._planned_s = SAMPLE_S  # after the last sample, for the next one
        self._memory_at_s = math.inf  # when the workers' memory is measured again
        self._idle_samples = 0
        self._quiescent = True  # whether every row was done, as far as was reported last while the client drove
        self._has_pending = False  # whether a worker has something ``pending``
        self._other_made = False  # whether the second arena exists
        self._last_number = 0  # of a spare
        self._spares_failed = 0  # how many spares in a row could not make their envs
        self._spares_at_s = math.inf  # when spares are made again
        self._resize(machine.cpus if sizing is None else sizing.workers)

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def processes(self) -> int:
        """How many processes it has at most, of workers and spares; until its first envs are made, may come to have."""
        grows = self.sizing is None or (self.phase is Phase.BUILDING and not self.sizing.told)
        later = min(self.make.num_envs, self._machine.workers_max) if grows else 0
        return max(len(self.workers), later) + (self.rules.hosting.spares or 0)

    @property
    def recycled(self) -> int:
        """How often a worker has taken over from another one that had not ended."""
        return sum(worker.recycled for worker in self.workers)

    def killed_for(self, number: int) -> str:
        """Why the hub kills this process, in words; empty if it does not."""
        process = self._processes().get(number)
        why = None if process is None else process.killed_for
        return "" if why is None else failure_text.reason(why)

    def expects_end(self, number: int) -> bool:
        """Whether this process ends because it was told so."""
        spare = self.spares.get(number)
        return self.phase is Phase.CLOSING or (spare is not None and spare.stage is Stage.LEAVING)

    @property
    def restarts(self) -> int:
        """How often its workers have ended, or made an env again."""
        return sum(map(self._restarts.count, range(len(self.workers))))

    @property
    def making(self) -> bool:
        """Whether its envs do not exist yet."""
        return self.phase in _MAKING

    @property
    def attachable(self) -> bool:
        """Whether another client may take it over."""
        return not self.making and self.phase not in (Phase.CLOSING, Phase.ENDED)

    @property
    def building(self) -> messages.HeartbeatReply:
        """How many of the envs are made."""
        built = sum(worker.built for worker in self.workers)
        importing = next((worker.importing for worker in self.workers if worker.importing), "")
        return messages.HeartbeatReply("running", self.phase.value, built, self.make.num_envs, importing)

    # --- the one door -------------------------------------------------------------------------------------------------

    def handle(self, stimulus: Stimulus, now_s: float) -> Instructions:
        """What is to be done about the stimulus.

        Raises:
            IllegalStimulus: it cannot come in this phase, which is a bug of the hub's.
        """
        kind: type = type(stimulus)
        if isinstance(stimulus, Requested):
            self.asked, kind = True, type(stimulus.message)
        elif isinstance(stimulus, WorkerSaid):
            kind = type(stimulus.message)
        self.history.append(kind)
        of_spare = isinstance(stimulus, (WorkerSaid, WorkerExited)) and stimulus.worker >= len(self.workers)
        if isinstance(stimulus, WorkerSaid):
            if not (stimulus.current or of_spare or self._lost(stimulus.worker)):
                return [_dropped(stimulus)]  # it is about a step that was given up
            if not of_spare and self.workers[stimulus.worker].again:
                return []  # it is about to be killed, and makes its envs once more
        try:
            handler: Handler = SessionState._on_spare if of_spare else TABLE[kind][self.phase][0]
        except KeyError:
            return self._on_unknown(kind, stimulus, now_s)
        instructions = handler(self, stimulus, now_s)
        if self._drain_by_s != math.inf:
            instructions = [*instructions, *self._drained(now_s)]
        return instructions

    def _lost(self, number: int) -> bool:
        """Whether this worker has ended and no other process serves its rows yet."""
        return self.workers[number].loss is not None

    def _on_unknown(self, kind: type, stimulus: Stimulus, now_s: float) -> Instructions:
        if kind not in TABLE and isinstance(stimulus, WorkerSaid) and self.phase not in _OVER:
            return self._abandon(_refusal(f"worker {stimulus.worker} sent a {kind.__name__}"), now_s)
        if isinstance(stimulus, WorkerSaid):
            return []  # the worker sent it before it was told of what brought about this phase
        raise IllegalStimulus(f"{kind.__name__} in phase {self.phase.value}")

    def next_deadline_s(self) -> float:
        """When ``Elapsed`` is due; infinity where nothing happens by the passing of time."""
        if self.phase is Phase.ENDED:
            return math.inf
        deadlines = [self._close_by_s, self._drain_by_s]
        if self.phase not in _OVER:
            deadlines += (self._sample_at_s if self._samples else math.inf, self._memory_at_s)
            if self._drain_by_s == math.inf:  # else none are made
                deadlines.append(self._spares_at_s)
            deadlines.append(self._next_age_s())
            for worker in self._processes().values():
                deadlines += (worker.restart_at_s, worker.kill_at_s, worker.finish_at_s)
        return min(deadlines)

    def measures(self, now_s: float) -> bool:
        """Whether ``Elapsed`` is to say how much memory the workers have."""
        return now_s >= self._memory_at_s

    @property
    def _samples(self) -> bool:
        """Whether the arena is read now and then: an env may hang, or a row be done of which no bell tells."""
        busy = self.phase is not Phase.READY or self.driver is Driver.CLIENT or self._takeover is not Takeover.NONE
        if busy or self._parts_out > 0 or any(w.alive and w.stage is not Stage.SERVING for w in self.workers):
            return True
        return any(spare.stage in (Stage.BUILDING, Stage.MAPPING) for spare in self.spares.values())

    def _plan_sample(self, now_s: float) -> None:
        """Have the arena read soon, if envs are at work; a time that is past is of an earlier request."""
        if not now_s < self._sample_at_s <= now_s + SAMPLE_S:
            self._sample_at_s = now_s + SAMPLE_S

    def validate(self) -> None:
        """Check what always holds between two stimuli; for tests.

        Raises:
            AssertionError: it does not.
        """
        assert sorted(row for worker in self.workers for row in worker.rows) == [*range(self.make.num_envs)]
        assert self.asked or self.phase not in (Phase.MOVING, Phase.CALLING, *_MAKING)
        assert (self._takeover is Takeover.MOVING) == (self.phase is Phase.HANDING_OVER)
        assert self.driver is Driver.HUB or (self._lent and not self._parts_out)
        assert self.lane is LaneName.WIRE or self._lent
        assert not self._receiving or self.asked
        assert self._failure is not None or self.phase is not Phase.BROKEN
        alive = any(worker.alive for worker in self._processes().values())
        assert self.phase is not Phase.ENDED or not (self.asked or alive)
        assert self.phase is not Phase.CLOSING or alive
        assert self._unused_spares() <= (self.rules.hosting.spares or 0)
        for spare in self.spares.values():
            assert spare.stage in (Stage.BUILDING, Stage.BUILT, Stage.LEAVING) or spare.successor
            assert spare.loss is None and not spare.waiting
        for worker in self.workers:
            assert worker.stage is not Stage.SERVING or (worker.loss is None and worker.made is None)
            assert worker.late is None or worker.alive
            assert not worker.moving or (self.phase in (Phase.HANDING_OVER, *_OVER) and worker.alive)
            if self.phase in (Phase.READY, Phase.MOVING, Phase.CALLING, Phase.HANDING_OVER):
                took_over = self.phase is Phase.HANDING_OVER and worker.stage is Stage.MAPPED
                assert (worker.loss is None) == (worker.stage is Stage.SERVING) or took_over
                assert worker.alive or worker.restart_at_s < math.inf
            if self.phase not in (*_MAKING, Phase.CALLING, *_OVER):
                assert not worker.waiting and (self.asked or worker.pending is None)

    def _on_nothing(self, _: Stimulus, now_s: float) -> Instructions:
        """The stimulus changes nothing in this phase."""
        return []

    # --- making -------------------------------------------------------------------------------------------------------

    def _resize(self, count: int) -> None:
        count = max(1, min(count, self.make.num_envs))
        for number in range(count):
            rows = list(range(number, self.make.num_envs, count))
            if number < len(self.workers):
                self.workers[number].rows = rows
            else:
                self.workers.append(WorkerState(rows, HangDetector(self.make.faults)))
        # Other sessions do not count: most are idle, and where they are not, spins are in vain and so become rare.
        self.worker_spin_us, self.driver_spin_us = self._spin_us(count), self._spin_us(count + 1)

    def _spin_us(self, processes: int) -> int:
        machine, wanted_us = self._machine, self.make.spin_us
        return spin_us(processes, machine.cpus, machine.quota) if wanted_us is None else wanted_us

    def _on_made(self, _: stimuli.SessionMade, now_s: float) -> Instructions:
        self._wait_for_all()
        if self.rules.hosting.memory_max or self.rules.hosting.recycle.memory_bytes:
            self._memory_at_s = now_s + MEMORY_S
        count = len(self.workers)
        if self.rules.libraries is None:
            count = min(count, self._machine.cpus)  # the others start when it is known which libraries they can share
        return [*self._start(range(count), now_s), *self._tell_if_crowded()]

    def _tell_if_crowded(self) -> Instructions:
        if self.sizing is None or not self.sizing.crowded:
            return []
        return [do.Notify("processes_shared", crowded_text(self.make.num_envs, len(self.workers)))]

    def _separate(self, number: int, now_s: float, why: str = SECOND_FAILED) -> Instructions:
        """Give each env its own process, since those of this worker cannot share one."""
        begun = [each for each, worker in enumerate(self.workers) if worker.alive]
        self._separated = why == SECOND_FAILED
        self.sizing = separate(self.make.num_envs, why, alone=self._separated)
        self._resize(self.sizing.workers)
        self._wait_for_all()
        for each in begun:
            self.workers[each].again = True
        started = self._start([each for each, worker in enumerate(self.workers) if not worker.alive], now_s)
        return [do.Warn("envs_separated", {"worker": number, "why": why}), *map(do.Kill, begun), *started]

    def _separable(self, worker: WorkerState) -> bool:
        """Whether more than one env is to be made in a worker's process, which nobody has told."""
        told = self.sizing is None or self.sizing.told or self.sizing.crowded or self.recipe.settings.vector
        enough = self.make.num_envs <= max(self._machine.workers_max, self._machine.cpus)
        return self.phase is Phase.BUILDING and not told and len(worker.rows) > 1 and enough

    def _wait_for_all(self) -> None:
        for worker in self.workers:
            worker.waiting = True

    def _start(self, numbers: Collection[int], now_s: float) -> Instructions:
        if not numbers:
            return []
        self._plan_sample(now_s)
        libraries = self._libraries
        for number in numbers:
            self.workers[number].start()
            self.workers[number].shares = bool(libraries)
        processes = do.StartProcesses(tuple(numbers), libraries=libraries)
        return [processes, *map(self._build, numbers)]

    def _build(self, number: int) -> do.Tell:
        return do.Tell(number, build(self.make, self.recipe, self.rules, self._place(number)))

    def _place(self, number: int) -> Place:
        cpu = self._machine.cpu(number) if self.make.pin else None
        return Place(number, None if self.sizing is None else len(self.workers), self.workers[number].rows, cpu)

    def _processes(self) -> dict[int, WorkerState]:
        """The workers and the spares, by their numbers."""
        return {**dict(enumerate(self.workers)), **self.spares}

    def _on_not_started(self, refused: stimuli.WorkersNotStarted, now_s: float) -> Instructions:
        instructions: Instructions = []
        if self.making:
            refusal = Failure("limit", "hub", f"a worker cannot be started: {refused.reason}")
            instructions += self._abandon(refusal, now_s)
        cause = ExitCause(f"cannot be started: {refused.reason}")
        for number in refused.workers:
            exited = self._on_exited if number < len(self.workers) else self._on_spare
            instructions += exited(WorkerExited(number, cause), now_s)
        return instructions

    def _on_building(self, said: WorkerSaid, now_s: float) -> Instructions:
        worker = self.workers[said.worker]
        worker.built, worker.importing = said.message.built, said.message.importing
        return []

    def _on_first_built(self, said: WorkerSaid, now_s: float) -> Instructions:
        """Decide on the number of workers, once the first env of each CPU is made, and have the other envs made."""
        if self.sizing is not None:
            return []
        worker = self.workers[said.worker]
        worker.first, worker.built, worker.stage = said.message, 1, Stage.BUILT
        self._note_libraries(worker, said.message.libraries)
        first = [each.first for each in self.workers if each.first is not None]
        if len(first) < len(self.workers):
            return []
        shares = bool(self.rules.hosting.shares_process)
        self.sizing = of_first_envs(self.make.num_envs, first, self._machine, shares)
        begun = len(self.workers)
        self._resize(self.sizing.workers)
        self._wait_for_all()
        for each in self.workers[:begun]:
            each.stage = Stage.BUILDING
        rest = [do.Tell(number, build_rest(self.make, self.rules, self._place(number))) for number in range(begun)]
        started = self._start(range(begun, len(self.workers)), now_s)
        return [*started[:1], *rest, *started[1:], *self._tell_if_crowded()]

    @property
    def _libraries(self) -> tuple[str, ...]:
        """What workers that start now have from their zygote.

        Once the session is made, they have what others of its workers had when they made their envs. With GPUs, each
        worker has variables of its own, which a library may read.
        """
        tried = self.phase is Phase.BUILDING or self._sharing_tried
        return self.rules.libraries or () if tried and not self.rules.hosting.gpus else ()

    def _note_libraries(self, worker: WorkerState, found: Sequence[str] | None) -> None:
        """Have the workers that start from now on share what this one has imported, too; none if they must not."""
        if found is None:
            self._share(())
        elif found and self.rules.libraries != () and not worker.shares:
            self._share(shared([*(self.rules.libraries or ()), *found]))

    def _share(self, libraries: Iterable[str]) -> None:
        self.rules = replace(self.rules, libraries=tuple(libraries))

    def _on_imported(self, said: WorkerSaid, now_s: float) -> Instructions:
        """Start the other workers, once each of the first has loaded what makes its envs."""
        worker, found = self.workers[said.worker], said.message.libraries
        if worker.shares and (found is None or not set(self.rules.libraries or ()) <= set(found)):
            return self._make_again(said.worker)  # the env, or its program, is not as it was when they were noted
        worker.imported = True
        self._note_libraries(worker, found)
        if not all(each.imported for each in self.workers if each.alive):
            return []
        return self._start([number for number, each in enumerate(self.workers) if not each.alive], now_s)

    def _make_again(self, number: int) -> Instructions:
        """Have a worker make its envs once more, without libraries, as all that start from now on."""
        self.workers[number].again = True
        self._share(())
        return [do.Kill(number)]

    def _on_built(self, said: WorkerSaid, now_s: float) -> Instructions:
        worker = self.workers[said.worker]
        if self._separable(worker) and not (said.message.fit or self.rules.hosting.shares_process):
            return self._separate(said.worker, now_s, "not all of its envs are known to share one well")
        worker.made, worker.waiting = said.message, False
        worker.stage, worker.built = Stage.BUILT, len(worker.rows)
        self._sharing_tried |= worker.shares
        if not worker.shares:
            self._note_libraries(worker, said.message.libraries)
        if any(each.waiting for each in self.workers):
            return []
        self._fit = all(each.made is not None and each.made.fit for each in self.workers)
        self._share(self.rules.libraries or ())  # where none was found, that is known from now on
        made = [each.made for each in self.workers if each.made is not None]
        first = made[0]
        action_space, action_leaves = first.action_space, first.action_leaves
        if any(each.action_structure != first.action_structure for each in made):
            action_space, action_leaves = codec.encode(ANYTHING), [OBJECT.wire()]
        self._map_message = control.MapArena(
            self.make.num_envs,
            first.observation_leaves,
            action_leaves,
            self._info_bytes,
            first.observation_spaces[0],
            action_space,
            self.make.observation_mode,
            self.worker_spin_us,
        )
        try:
            layout = self._map_message.layout()
        except ValueError as error:
            why = Failure("limit", "hub", f"these envs have no place in shared memory: {error}")
            return self._abandon(why, now_s)
        self.phase = Phase.MAPPING
        self._wait_for_all()
        return [
            do.MakeArena(layout, first.loose, self.recipe.settings.vector),
            *map(self._map, range(len(self.workers))),
        ]

    def _map(self, number: int) -> do.GiveArena:
        self.workers[number].stage = Stage.MAPPING
        return self._give_arena(number)

    def _give_arena(self, number: int, place: int | None = None) -> do.GiveArena:
        """Hand the arena to a worker, or to the spare that is about to take the place of a worker."""
        assert self._map_message is not None
        return do.GiveArena(number, self._map_message, place)

    def _on_arena_refused(self, refused: stimuli.ArenaRefused, now_s: float) -> Instructions:
        return self._abandon(Failure("limit", "hub", refused.reason), now_s)

    def _on_first_mapped(self, said: WorkerSaid, now_s: float) -> Instructions:
        self._restarts.serves(said.worker, now_s)
        worker = self.workers[said.worker]
        worker.waiting, worker.stage = False, Stage.MAPPED
        if any(each.waiting for each in self.workers):
            return []
        self.phase = Phase.READY
        made = self._describe()
        self.made = replace(made, autoreset_mode=self.make.autoreset_mode, observation_mode=self.make.observation_mode)
        served: Instructions = []
        for number, each in enumerate(self.workers):
            each.stage, each.made, each.serves_since_s = Stage.SERVING, None, now_s
            served.append(do.HandOver(number, control.Serve(info=self.make.lost)))
        learned = [do.LearnCost(StepCost(0.0, 0.0, alone=True))] if self._separated else []
        return [*served, *learned, *self._answered(do.Answer(made)), *self._make_spares(now_s)]

    def _describe(self) -> messages.Made:
        made = [worker.made for worker in self.workers]
        first = made[0]
        assert first is not None and self._map_message is not None
        spaces = first.observation_spaces
        if self.make.observation_mode == "different":
            by_worker = [each.observation_spaces for each in made if each is not None]
            spaces = [by_worker[row % len(made)][row // len(made)] for row in range(self.make.num_envs)]
        return messages.Made(
            num_envs=self.make.num_envs,
            num_workers=len(self.workers),
            observation_spaces=spaces,
            action_space=self._map_message.action_space,
            metadata=first.metadata,
            render_mode=first.render_mode,
            spec=first.spec,
            sizing="" if self.sizing is None else self.sizing.reason,
            vector=self.recipe.settings.vector,
        )

    def _on_making_failed(self, said: WorkerSaid, now_s: float) -> Instructions:
        worker, failure = self.workers[said.worker], said.message.failure
        if worker.shares and self.phase is Phase.BUILDING:
            return self._make_again(said.worker)
        if self._separable(worker) and failure.env_index in worker.rows[1:]:
            return self._separate(said.worker, now_s)
        return self._abandon(failure, now_s)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _answered(self, answer: do.Answer | do.Fail | do.AnswerHops) -> Instructions:
        """The request under way is answered, if there is one; a client on the shared lane drives again."""
        if not self.asked:
            return []
        self.asked = False
        self._receiving = 0
        if self._has_pending:
            self._has_pending = False
            for worker in self.workers:
                worker.pending = None
        if self.lane is LaneName.SHARED and self.driver is Driver.HUB and self._idle:
            self.driver, self._idle_samples = Driver.CLIENT, 0
            return [answer, do.GiveDrive()]
        return [answer]

    @property
    def _idle(self) -> bool:
        """Whether nothing that the hub drives is under way."""
        return self.phase is Phase.READY and not self.asked and not self._parts_out

    def _is_idle(self, quiescent: bool) -> bool:
        """Whether no env is at work; ``quiescent`` counts while the client drives."""
        driven = self.driver is Driver.CLIENT and not quiescent
        return not (self.asked or self._parts_out or driven) and self.phase in (Phase.READY, Phase.BROKEN)

    def _refuse(self, text: str) -> Instructions:
        return self._answered(do.Fail(_refusal(text)))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _on_step(self, request: Requested, now_s: float) -> Instructions:
        # Inlined, for every step over the wire comes this way: nothing forbids it, and the hub drives already.
        # Once the hub shuts down, a session that has nothing under way is closing.
        if self.driver is Driver.CLIENT or self._parts_out:
            if refused := self._refused(request):
                return refused
            return [*self._begin(Phase.MOVING, now_s), do.PostStep()]
        if self._failure is not None or self._uncollected or self.infos:
            self._forget_last()
        if not now_s < self._sample_at_s < math.inf:
            self._sample_at_s = now_s + SAMPLE_S
        self.phase = Phase.MOVING
        return _POST_STEP

    def _refused(self, request: Requested) -> Instructions:
        """Refuse a request of the whole batch if something forbids it; else returns nothing."""
        if self._drain_by_s != math.inf:
            return self._answered(do.Fail(SHUTTING_DOWN))
        if self._parts_out and not isinstance(request.message, Send):
            return self._refuse("envs are under way that RECEIVE has not returned")
        if self.driver is Driver.CLIENT and not request.quiescent:
            return self._refuse("a step that the client drives has not ended; wait for it")
        return []

    def _begin(self, phase: Phase, now_s: float) -> Instructions:
        """Begin a request that the hub drives, and that was not refused."""
        self.phase = phase
        self._plan_sample(now_s)
        if phase is not Phase.READY:
            self._forget_last()
        return self._take_drive()

    def _take_drive(self) -> Instructions:
        """Have the hub drive; every row is done."""
        if self.driver is Driver.HUB:
            return []
        self.driver = Driver.HUB
        return [do.TakeDrive()]

    def _forget_last(self) -> None:
        self._failure = None
        self._uncollected.clear()
        self.infos.clear()

    def _on_actions_refused(self, refused: stimuli.ActionsRefused, now_s: float) -> Instructions:
        if self.phase is Phase.MOVING:
            self.phase = Phase.READY
        return self._answered(do.Fail(Failure("bad_actions", "request", refused.problem)))

    def _on_rows_done(self, _: stimuli.RowsDone, now_s: float) -> Instructions:
        self.phase = Phase.READY
        answered = self._answered(_OUTCOME if self._failure is None else do.Fail(self._failure))
        return [*answered, *self._advance_takeover(True, now_s)] if self._takeover is not Takeover.NONE else answered

    def _on_reset(self, request: Requested, now_s: float) -> Instructions:
        reset, num_envs = request.message, self.make.num_envs
        seeds, mask = reset.seeds or [None] * num_envs, reset.mask or [True] * num_envs
        if len(seeds) != num_envs or len(mask) != num_envs or not any(mask):
            return self._refuse(f"a reset needs {num_envs} seeds and a mask of {num_envs}, some True")
        each = reset.options_each
        if len(each) not in (0, num_envs):
            return self._refuse(f"a reset needs the options of {num_envs} envs, got {len(each)}")
        if each and self.recipe.settings.vector:
            return self._refuse("a vector env takes options for all of its envs, and not for each")
        if refused := self._refused(request):
            return refused
        kept = zip(self._seeds, seeds, mask, strict=True)
        self._seeds = [seed if chosen and seed is not None else last for last, seed, chosen in kept]
        instructions = [*self._begin(Phase.MOVING, now_s), do.PostReset()]
        for number, worker in enumerate(self.workers):
            rows = [row for row in worker.rows if mask[row]]
            options_each = [each[row] for row in rows] if each else []
            message = control.ResetRows(rows, [seeds[row] for row in rows], reset.options, options_each)
            instructions += self._tell(number, message)
        return instructions

    def _tell(self, number: int, message: Any) -> Instructions:
        """Tell a worker its part of the request, now, or once its next process serves."""
        worker = self.workers[number]
        worker.pending, self._has_pending = message, True
        if worker.stage is Stage.SERVING:
            return [do.Tell(number, message)]
        if isinstance(message, control.ResetRows) and not message.rows:
            worker.pending = None
            return [do.KeepRows(number)]
        return []

    def _on_call(self, request: Requested, now_s: float) -> Instructions:
        call = request.message
        # The name of a class is compared, and nothing else.
        if call.question != "wrapped" and (forbidden := self._forbidden(call.name)):
            return forbidden
        wanted = control.CallRows(
            [], call.name, call.args, call.only_kind, call.skip_unreset, call.question, reset_first=call.reset_first
        )
        return self._call(request, now_s, lambda rows: replace(wanted, rows=rows))

    def _on_set_attr(self, request: Requested, now_s: float) -> Instructions:
        name, values = request.message.name, request.message.values
        if forbidden := self._forbidden(name):
            return forbidden
        rows = request.message.rows or range(self.make.num_envs)
        if len(values) not in (1, len(rows)):
            return self._refuse(f"set_attr needs 1 or {len(rows)} values, got {len(values)}")
        if len(values) == 1:
            return self._call(request, now_s, lambda rows: control.SetAttrRows(rows, name, values[0]))
        each = dict(zip(rows, values, strict=True))
        return self._call(
            request, now_s, lambda rows: control.SetAttrRows(rows, name, each=[each[row] for row in rows])
        )

    def _forbidden(self, name: str) -> Instructions:
        """The refusal of a name that is not for clients on the network, such as ``__setstate__``, which may import."""
        if not name.startswith("_") or self.make.world is not None:
            return []
        text = f"{name!r} begins with an underscore: only the program of a private hub (hub=None) may use such a name"
        return self._answered(do.Fail(Failure("not_permitted", "request", text)))

    def _call(
        self,
        request: Requested,
        now_s: float,
        message_of: Callable[[list[int]], control.CallRows | control.SetAttrRows],
    ) -> Instructions:
        """Tell each worker that has some of the wanted rows ``message_of`` those."""
        asked = request.message.rows
        if asked and (asked != sorted(set(asked)) or asked[-1] >= self.make.num_envs):
            return self._refuse(f"the rows of a call must ascend, and be less than {self.make.num_envs}")
        if refused := self._refused(request):
            return refused
        wanted = set(asked or range(self.make.num_envs))
        instructions = self._begin(Phase.CALLING, now_s)
        self._calls += 1
        for number, worker in enumerate(self.workers):
            if rows := [row for row in worker.rows if row in wanted]:
                worker.waiting = True
                instructions += self._tell(number, replace(message_of(rows), number=self._calls))
        return instructions

    def _on_call_answered(self, said: WorkerSaid, now_s: float) -> Instructions:
        worker, answer = self.workers[said.worker], said.message
        if not isinstance(worker.pending, _CALLS) or worker.pending.number != answer.number:
            return [_dropped(said)]
        asked, worker.pending = worker.pending, None
        rows = asked.rows
        if isinstance(answer, control.CallFailed):
            self._note_failure(answer.failure)
        elif len(answer.values) != len(rows):
            text = f"worker {said.worker} gave the results of {len(answer.values)} envs in place of {len(rows)}"
            self._note_failure(_refusal(text))
        else:
            worker.results = tuple(zip(rows, answer.values, strict=True))
        worker.waiting = False
        forgotten: Instructions = []
        if isinstance(asked, control.SetAttrRows) and worker.results and not self._attributes.note(asked):
            # It will not be set again on envs that take the place of others.
            forgotten = [do.Warn("attribute_not_kept", {"name": asked.name[:200]})]
        return [*forgotten, *self._on_called(now_s)]

    def _on_called(self, now_s: float) -> Instructions:
        if any(worker.waiting for worker in self.workers):
            return []
        self.phase = Phase.READY
        if self._failure is not None:
            answered = self._answered(do.Fail(self._failure))
        else:
            pairs = tuple(sorted(chain.from_iterable(worker.results for worker in self.workers)))
            answered = self._answered(do.Answer(messages.Done(), rows=pairs))
        for worker in self.workers:
            worker.results = ()
        return [*answered, *self._advance_takeover(True, now_s)]

    # What a client may ask for while it drives.

    def _on_collect(self, request: Requested, now_s: float) -> Instructions:
        # They are kept, for a client that was interrupted asks again; the next ones of a row take their place.
        rows = sorted(request.message.rows)
        failures = [self._uncollected[row] for row in rows if row in self._uncollected]
        infos = tuple((row, self.infos[row]) for row in rows if row in self.infos)
        return self._answered(do.Fail(failures[0]) if failures else do.Answer(messages.Done(), rows=infos))

    def _on_templates(self, request: Requested, now_s: float) -> Instructions:
        found = {
            number: worker.templates[number]
            for number in request.message.numbers
            for worker in self.workers
            if number in worker.templates
        }
        return self._answered(do.Answer(Templates([*found], [*found.values()])))

    def _on_hops(self, request: Requested, now_s: float) -> Instructions:
        return self._answered(do.AnswerHops())

    # Parts of a batch.

    def _on_send(self, request: Requested, now_s: float) -> Instructions:
        if refused := self._refused(request):
            return refused
        shares = self.make.num_envs, len(self.workers)
        if self.recipe.settings.vector and not whole_shares(request.message.rows, *shares):
            return self._refuse(split_share(*shares))
        return [*self._begin(Phase.READY, now_s), do.PostPart()]

    def _on_part_posted(self, posted: stimuli.PartPosted, now_s: float) -> Instructions:
        self._parts_out += posted.rows
        return self._answered(do.Answer(messages.Done()))

    def _on_receive(self, request: Requested, now_s: float) -> Instructions:
        if not self._parts_out:
            return self._refuse("no env is under way")
        self._receiving = max(1, min(request.message.min_envs, self._parts_out))
        return [do.TakePart(self._receiving)]

    def _on_part_done(self, done: stimuli.PartDone, now_s: float) -> Instructions:
        if not self._receiving:
            return []
        if done.raised is not None:
            self._parts_out -= 1
            unknown = Failure("internal", "session", f"env {done.raised} failed, and no worker said why")
            return self._answered(do.Fail(self._uncollected.pop(done.raised, unknown)))
        self._parts_out -= len(done.rows)
        large = [(row, self.infos.pop(row)) for row in done.large if row in self.infos]
        rows = tuple(sorted([*done.small, *large]))
        return self._answered(do.Answer(messages.Done(), rows=rows, part=done.rows))

    # Requests that are not carried out.

    def _on_closing_request(self, request: Requested, now_s: float) -> Instructions:
        if self._end_by_s != math.inf:
            return self._answered(do.Fail(SHUTTING_DOWN))
        return self._refuse(f"the session is {self.phase.value}")

    def _on_broken_request(self, request: Requested, now_s: float) -> Instructions:
        assert self._failure is not None
        return self._answered(do.Fail(self._failure))

    # --- what workers say of their rows -------------------------------------------------------------------------------

    def _on_row_info(self, said: WorkerSaid, now_s: float) -> Instructions:
        if said.message.row in self.workers[said.worker].rows:
            self._note_info(said.message.row, said.message.info)
        return []

    def _on_stand_in_info(self, info: stimuli.StandInInfo, now_s: float) -> Instructions:
        self._note_info(info.row, info.info)
        return []

    def _note_info(self, row: int, info: bytes) -> None:
        self.infos[row] = info
        self._uncollected.pop(row, None)

    def _on_template(self, said: WorkerSaid, now_s: float) -> Instructions:
        number, example = said.message.number, said.message.example
        templates = self.workers[said.worker].templates
        if len(example) <= EXAMPLE_BYTES_MAX:
            templates.pop(number, None)
            templates[number] = example  # as the last one
        if len(templates) > KEPT_TEMPLATES_MAX:
            del templates[next(iter(templates))]
        return []

    def _on_row_failed(self, said: WorkerSaid, now_s: float) -> Instructions:
        failure, worker = said.message.failure, self.workers[said.worker]
        if worker.loss is not None and failure.code == "factory_failed":
            worker.boot_failure = failure
            return []
        row, cause = failure.env_index, "nan" if said.message.invalid else "exception"
        found = EnvFailure(cause, failure.message, exception=failure.type, traceback=failure.traceback)
        number, tick = said.message.number, said.message.tick
        kept = self._keep_raised(said.worker, -1 if row is None else row, number, tick, found)
        name = name_of_raised(self.rules.replays, row, number) if kept and row is not None else ""
        return [*kept, *self._on_failed(replace(failure, replay=name), worker.rows)]

    def _on_stand_in_failed(self, failed: stimuli.StandInFailed, now_s: float) -> Instructions:
        return self._on_failed(failed.failure, range(self.make.num_envs))

    def _on_failed(self, failure: Failure, rows: Collection[int]) -> Instructions:
        if self.phase in (Phase.READY, Phase.HANDING_OVER):
            if failure.env_index is not None and failure.env_index in rows:
                self._uncollected[failure.env_index] = failure
                self.infos.pop(failure.env_index, None)
        else:
            self._note_failure(failure)
        return []

    def _note_failure(self, failure: Failure) -> None:
        """Of several failures of a request the first env's is told."""
        if self._failure is None or (failure.env_index or 0) < (self._failure.env_index or 0):
            self._failure = failure

    def _on_closing_failed(self, said: WorkerSaid, now_s: float) -> Instructions:
        if self.workers[said.worker].loss is None:  # else it was about to take the place of one that ended
            self._note_failure(said.message.failure)
        return []

    def _on_step_times(self, said: WorkerSaid, now_s: float) -> Instructions:
        """Tell what steps of the env take, and, once, that another number of workers would suit them better."""
        self.workers[said.worker].times = said.message
        if self.recipe.settings.vector:  # which are not of single envs, and choose no number of workers
            return []
        cost = average(worker.times for worker in self.workers if worker.times is not None)
        if cost is None or self.sizing is None:
            return []
        cost = replace(cost, libraries=self.rules.libraries, fit=self._fit, alone=self._is_alone)
        learned: Instructions = [do.LearnCost(cost)]
        count, num_envs = len(self.workers), self.make.num_envs
        by_itself = self._fit or bool(self.rules.hosting.shares_process)
        # That envs could share a process, if they may, is told once, and not in each session of theirs.
        told = self._warned or self.sizing.told or (self.rules.cost_known and not by_itself)
        better = None if told else better_count(num_envs, count, cost, self._machine)
        if better is None:
            return learned
        self._warned = True
        text = better_count_text(num_envs, count, *better, cost, bool(key(self.make)) and by_itself)
        return [*learned, do.Notify("worker_count_unsuitable", text)]

    @property
    def _is_alone(self) -> bool:
        """Whether a process cannot have two of its envs, as was seen here, or before if none has two here."""
        assert self.sizing is not None
        return self.sizing.alone or (self.rules.alone and len(self.workers) == self.make.num_envs)

    def _on_shared_changed(self, said: WorkerSaid, now_s: float) -> Instructions:
        what = [each for each in control.SHARED if each in said.message.what]
        if self._shared_told or not what:
            return []
        self._shared_told = True
        return [do.Notify("process_state_shared", shared_text(what))]

    # --- workers that end, and those that take their place ------------------------------------------------------------

    def _on_exited(self, exited: WorkerExited, now_s: float) -> Instructions:
        number = exited.worker
        worker = self.workers[number]
        why = worker.end()
        if self.phase is Phase.CLOSING:
            return self._ended() if not any(each.alive for each in self._processes().values()) else []
        if self.phase is Phase.BROKEN:
            return []
        failure = failure_text.failure(number, worker.rows, exited.cause, why, self.rules.hide_folders)
        unshared = worker.shares and (why is None or not worker.imported)
        if self.phase is Phase.BUILDING and (worker.again or unshared):
            if worker.shares:
                self._share(())
            worker.again, worker.waiting, worker.made = False, True, None
            return self._start([number], now_s)
        # That somebody, or the kernel for want of memory, has killed it says nothing of its envs.
        by_itself = isinstance(why, Late) or (why is None and exited.cause.signal != "SIGKILL")
        if self._separable(worker) and worker.built and by_itself:
            return self._separate(number, now_s)
        if self.making and exited.cause.unready:
            return self._abandon(failure_text.unready(self.make, exited.cause.unready, self.rules), now_s)
        if self.making:
            text = failure.message if isinstance(why, Late) else f"{failure.message} while it built its envs"
            return self._abandon(replace(failure, message=text), now_s)
        return [
            *self._advance_takeover(False, now_s),
            *self._lose(number, failure, exited, why, now_s),
        ]

    def _lose(
        self, number: int, failure: Failure, exited: WorkerExited, why: Late | Overrun | None, now_s: float
    ) -> Instructions:
        """The worker's rows are the hub's until another process has taken its place, if one is to.

        A call that the ended process had not read is told to the next one.
        """
        worker = self.workers[number]
        was_serving = worker.loss is None
        if worker.boot_failure is not None:
            failure = replace(failure, message=f"{failure.message}; before that: {worker.boot_failure.message}")
            worker.boot_failure = None
        delay_s = self._restarts.ended(number, now_s)
        count = self._restarts.count(number)
        if was_serving and self.rules.replays:
            failure = replace(failure, replay=f"{self.rules.replays}-worker{number}-{count}")
        found = failure_text.env_failure(failure, exited.cause, why, count - 1)
        kept = self._keep_replay(number, None, -1, found)
        if delay_s is None:
            return [*kept, *self._break(failure_text.exhausted(failure, self._restarts.told(number)))]
        worker.restart_at_s = now_s + delay_s
        worker.loss = failure_text.loss(failure, found, self.make.faults)
        resetting = tuple(worker.pending.rows) if isinstance(worker.pending, control.ResetRows) else None
        taken: Instructions = [*kept, do.TakeRows(number, worker.loss, resetting)]
        unread = exited.unread is not None and exited.unread is worker.pending and why is None
        if self.phase is Phase.CALLING and was_serving and worker.waiting and not unread:
            self._failure = self._failure or replace(failure, message=f"{failure.message} during a call")
            worker.waiting, worker.pending = False, None
            taken += self._on_called(now_s)
        return [*taken, *self._replace_lost(now_s)]

    def _keep_replay(self, number: int, row: int | None, tick: int, failure: EnvFailure) -> Instructions:
        """Keep what the env was asked that failed so; without a row, of the one that the worker was at."""
        if not failure.replay:
            return []
        assert self._map_message is not None
        made = build(self.make, self.recipe, self.rules, self._place(number))
        limit = self.rules.hosting.memory_max
        return [do.KeepReplay(number, row, tick, failure, made, self._map_message, limit)]

    def _keep_raised(self, number: int, row: int, request: int, tick: int, failure: EnvFailure) -> Instructions:
        rows = self.workers[number].rows
        if tick < 0 or not self.rules.replays or row not in rows:
            return []
        if self.recipe.settings.vector and row != rows[0]:  # one replay is that of all envs of a vector env
            return []
        name = name_of_raised(self.rules.replays, row, request)
        return self._keep_replay(number, row, tick, replace(failure, replay=name))

    def _break(self, failure: Failure) -> Instructions:
        self._failure = failure
        self.phase = Phase.BROKEN
        spares = map(do.Kill, self.spares)
        return [*self._answered(do.Fail(failure)), *self._revoked(), *self._fail_takeover(), *spares]

    def _on_faulted(self, said: WorkerSaid, now_s: float) -> Instructions:
        """An env raised where that is a truncation, and was made again."""
        row, found = said.message.row, EnvFailure.from_map(said.message.failure)
        kept = self._keep_raised(said.worker, row, said.message.number, said.message.tick, found)
        if self._restarts.faulted(said.worker, now_s):
            return kept
        text = f"env {row} raised {said.message.message}"
        failure = Failure("worker_died", "request", text, env_index=row, worker=said.worker)
        return [*kept, *self._break(failure_text.exhausted(failure, self._restarts.told(said.worker)))]

    def _on_built_again(self, said: WorkerSaid, now_s: float) -> Instructions:
        worker = self.workers[said.worker]
        if worker.stage is not Stage.BUILDING:
            return []
        worker.stage, worker.built = Stage.BUILT, len(worker.rows)
        return [self._map(said.worker)]

    def _on_mapped(self, said: WorkerSaid, now_s: float) -> Instructions:
        worker = self.workers[said.worker]
        if worker.moving:
            worker.moving = False
            return self._advance_takeover(False, now_s)
        if worker.stage is not Stage.MAPPING:
            return []
        self._restarts.serves(said.worker, now_s)
        worker.stage = Stage.MAPPED
        return [] if self.phase is Phase.HANDING_OVER else self._hand_over(said.worker, now_s)

    def _hand_over(self, number: int, now_s: float, ending: bytes = b"") -> Instructions:
        """Have the worker serve its rows, the first of which it is to end an episode of, if ``ending`` says so."""
        worker = self.workers[number]
        loss = worker.loss
        worker.stage, worker.loss, worker.boot_failure, worker.finish_at_s = Stage.SERVING, None, None, math.inf
        cut = failure_text.cut(number, worker.rows) if worker.overdue else b""
        worker.serves_since_s, worker.worn, worker.overdue = now_s, False, False
        worker.nbytes, worker.leaves_since_s, worker.leaves_bytes = 0, math.inf, math.inf
        worker.detector.rest()
        count = self._restarts.count(number) + worker.recycled
        seeds = [reseeded(self._seeds[row], count) for row in worker.rows]
        failure, info = (loss.failure if loss.raises else None, loss.info) if loss is not None else (None, cut)
        again = [do.Tell(number, message) for message in self._attributes.again(worker.rows)]
        return [*again, do.HandOver(number, control.Serve(seeds, failure, info, ending=ending), worker.pending)]

    def _on_rows_waiting(self, waiting: stimuli.RowsWaiting, now_s: float) -> Instructions:
        worker = self.workers[waiting.worker]
        if worker.loss is not None:
            worker.finish_at_s = min(worker.finish_at_s, now_s + self.make.faults.restart_wait_s)
        return []

    # --- spares -------------------------------------------------------------------------------------------------------

    def _make_spares(self, now_s: float) -> Instructions:
        """Have as many spares made as there are to be."""
        if self._waits_for_spares(now_s):
            return []
        self._spares_at_s = math.inf
        made: Instructions = []
        while self._unused_spares() < (self.rules.hosting.spares or 0):
            made += self._make_spare(self._place_to_spare(), now_s)
        return made

    def _waits_for_spares(self, now_s: float) -> bool:
        """Whether none are made now: the hub shuts down, or the last one could not make its envs."""
        return self._drain_by_s != math.inf or now_s < self._spares_at_s < math.inf

    def _unused_spares(self) -> int:
        """How many spares are for any worker that ends."""
        return sum(not (spare.successor or spare.stage is Stage.LEAVING) for spare in self.spares.values())

    def _make_spare(self, place: int, now_s: float, successor: bool = False) -> Instructions:
        self._last_number = max(self._last_number + 1, len(self.workers))
        number, rows = self._last_number, self.workers[place].rows
        self.spares[number] = spare = Spare(rows, HangDetector(self.make.faults), place=place, successor=successor)
        spare.start()
        self._plan_sample(now_s)
        order = build(self.make, self.recipe, self.rules, self._place(place))
        return [do.StartProcesses((number,), True, self._libraries), do.Tell(number, order)]

    def _group(self, number: int) -> tuple[int, int]:
        """Workers of one group have equal envs and the same device, so that they may have each other's spares."""
        if self.make.kwargs_each or (self.make.factories and not self.make.alike):
            return number, 0
        envs = len(self.workers[number].rows) if self.recipe.settings.vector else 0  # which cannot lose some of them
        return number % max(1, len(self.rules.hosting.gpus)), envs

    def _place_to_spare(self) -> int:
        """The worker for whose place the next spare is made: first the group with fewest of them, then most restarts.

        Of a group it is the first worker, which has as many rows as any.
        """
        spared = [self._group(spare.place) for spare in self.spares.values() if not spare.successor]
        first = {self._group(number): number for number in reversed(range(len(self.workers)))}
        return min(first.values(), key=lambda n: (spared.count(self._group(n)), -self._restarts.count(n), n))

    def _on_spare(self, event: WorkerSaid | WorkerExited, now_s: float) -> Instructions:
        """What a spare says, and its end."""
        spare = self.spares.get(event.worker)
        if spare is None:
            return []
        if isinstance(event, WorkerExited):
            return self._on_spare_exited(event, now_s)
        if self.phase in _OVER:
            return []
        match event.message:
            case control.Building(built):
                spare.built = built
            case control.Built() if spare.stage is Stage.BUILDING:
                spare.stage, spare.built, self._spares_failed = Stage.BUILT, len(spare.rows), 0
                return [*self._replace_lost(now_s), *self._prepare(event.worker)]
            case control.Mapped() if spare.moving:
                spare.moving = False
                return self._advance_takeover(False, now_s)
            case control.Mapped() if spare.stage is Stage.MAPPING:
                spare.stage = Stage.MAPPED
                spare.detector.rest()
                return self._have_leave(spare.place, now_s)
        return []

    def _on_spare_exited(self, exited: WorkerExited, now_s: float) -> Instructions:
        left = self.spares[exited.worker].stage is Stage.LEAVING
        self.spares.pop(exited.worker).end()
        if self.phase is Phase.CLOSING:
            return self._ended() if not any(each.alive for each in self._processes().values()) else []
        if self.phase is Phase.BROKEN:
            return []
        if left:
            return self._recycle(now_s)
        retry_s = min(SPARE_RETRY_MAX_S, SPARE_RETRY_S * 2.0 ** min(self._spares_failed, 64))
        self._spares_failed += 1
        self._spares_at_s = now_s + retry_s
        return []

    def _replace_lost(self, now_s: float) -> Instructions:
        """Have spares take the places of workers that have ended and whose next process has not made its envs yet.

        That process, if there is one, becomes the spare.
        """
        instructions: Instructions = []
        for number, worker in enumerate(self.workers):
            if worker.loss is None or worker.stage not in (Stage.ABSENT, Stage.BUILDING):
                continue
            chosen = self._fit_spare(number)
            if chosen is None:
                continue
            if self.spares[chosen].stage is not Stage.BUILT:
                instructions += self._succeed(number, chosen, now_s)
                continue
            del self.spares[chosen]
            if worker.stage is Stage.BUILDING:
                self.spares[chosen] = left = worker.as_spare(number)
                worker.detector = HangDetector(self.make.faults)
                if self._unused_spares() > (self.rules.hosting.spares or 0):  # what took its place was a successor
                    left.stage = Stage.LEAVING
                    instructions.append(do.Kill(number))
            worker.stage, worker.built, worker.restart_at_s = Stage.BUILT, len(worker.rows), math.inf
            place = self._place(number)
            order = control.TakePlace(number, worker.rows, variables(self.rules, place), place.cpu)
            instructions += [do.SwapProcesses(number, chosen), do.Tell(number, order), self._map(number)]
        return [*instructions, *self._make_spares(now_s)]

    def _fit_spare(self, number: int) -> int | None:
        """A spare that can take this worker's place at once: its successor first."""
        made = (Stage.BUILT, Stage.MAPPING, Stage.MAPPED)
        ready = [n for n, s in self.spares.items() if s.stage in made and not (s.late or s.overrun)]
        own = [n for n in ready if self.spares[n].successor and self.spares[n].place == number]
        group = self._group(number)
        fit = (n for n in ready if not self.spares[n].successor and self._group(self.spares[n].place) == group)
        return own[0] if own else next(fit, None)

    # --- workers that are recycled ------------------------------------------------------------------------------------

    def _next_age_s(self) -> float:
        """When a worker is too old, or has been so for as long."""
        age_s = self.rules.hosting.recycle.age_s
        if not age_s:
            return math.inf
        return min((self._wears_since(worker)[0] + age_s for worker in self.workers), default=math.inf)

    def _wears_since(self, worker: WorkerState) -> tuple[float, float]:
        """Since when, and from how much memory on, its next limit counts; infinity where it has none.

        The first one is that of its serving. The envs of a worker that has several may never be between episodes at one
        time, and a vector env that resets them within a step never is: so there is another one from when its successor
        is ready, after which their episodes are cut.
        """
        never_between = self.recipe.settings.vector and self.make.autoreset_mode == "SameStep"
        leaves_by_itself = len(worker.rows) == 1 and not never_between
        if worker.stage is not Stage.SERVING or worker.overdue or (worker.worn and leaves_by_itself):
            return math.inf, math.inf
        return (worker.leaves_since_s, worker.leaves_bytes) if worker.worn else (worker.serves_since_s, 0)

    def _on_episodes_done(self, said: WorkerSaid, now_s: float) -> Instructions:
        """A worker has ended as many episodes as it is to, or as many again."""
        since_s, _ = self._wears_since(self.workers[said.worker])
        due = since_s < math.inf and said.message.leaving == self.workers[said.worker].worn
        return [*(self._wear(said.worker) if due else ()), *self._recycle(now_s)]

    def _note_worn(self, memory: Mapping[int, int], now_s: float) -> Instructions:
        """Note which workers are too old or have too much memory."""
        recycle = self.rules.hosting.recycle
        instructions: Instructions = []
        for number, worker in enumerate(self.workers):
            worker.nbytes = memory.get(number, worker.nbytes)
            since_s, nbytes = self._wears_since(worker)
            old = recycle.age_s and now_s >= since_s + recycle.age_s
            large = recycle.memory_bytes and worker.nbytes > nbytes + recycle.memory_bytes
            if old or large:
                instructions += self._wear(number)
        return instructions

    def _wear(self, number: int) -> Instructions:
        """Have a worker recycled between episodes; if that is so already, in the middle of them."""
        worker = self.workers[number]
        if not worker.worn:
            worker.worn = True
            return []
        ready = any(s.successor and s.place == number and s.stage is Stage.MAPPED for s in self.spares.values())
        if not ready:  # it has ended since, and the next limit counts from when there is another
            worker.leaves_since_s = worker.leaves_bytes = math.inf
            return []
        worker.overdue = True
        return [do.Tell(number, control.Leave(cut=True))]

    def _have_leave(self, number: int, now_s: float) -> Instructions:
        """Tell a worker whose successor is ready to leave between episodes; the successor of a lost one takes over."""
        worker = self.workers[number]
        if worker.stage is not Stage.SERVING:
            return self._replace_lost(now_s)
        worker.leaves_since_s, worker.leaves_bytes = now_s, worker.nbytes
        return [do.Tell(number, control.Leave())]

    def _recycle(self, now_s: float) -> Instructions:
        """Have successors of workers made, one at a time, so that the other workers keep the CPUs.

        A worker has none while its predecessor still closes its envs, however long that takes: of a place there are two
        processes at most.
        """
        if self._waits_for_spares(now_s):
            return []
        if any(spare.successor and spare.stage is Stage.BUILDING for spare in self.spares.values()):
            return []
        succeeded = {spare.place for spare in self.spares.values() if spare.successor or spare.stage is Stage.LEAVING}
        worn = [n for n, each in enumerate(self.workers) if each.worn and n not in succeeded and not self._lost(n)]
        if not worn:
            return []
        number = min(worn, key=lambda n: self.workers[n].serves_since_s)  # so that none waits for ever
        spare = self._fit_spare(number)
        if spare is None:
            return self._make_spare(number, now_s, successor=True)
        self.spares[spare].successor, self.spares[spare].place = True, number
        return [*self._prepare(spare), *self._make_spares(now_s), *self._recycle(now_s)]

    def _prepare(self, number: int) -> Instructions:
        """Hand the arena to a successor whose envs are made, so that it can take over at once."""
        spare = self.spares.get(number)
        if spare is None or not spare.successor or spare.stage is not Stage.BUILT:
            return []
        spare.stage = Stage.MAPPING
        rows, place = self.workers[spare.place].rows, self._place(spare.place)
        spare.rows = rows
        order = control.TakePlace(spare.place, rows, variables(self.rules, place), place.cpu)
        return [do.Tell(number, order), self._give_arena(number, spare.place)]

    def _on_left(self, said: WorkerSaid, now_s: float) -> Instructions:
        """A worker serves its rows no more: its successor does; or, if that has ended, it counts as lost."""
        number = said.worker
        ready = (n for n, s in self.spares.items() if s.successor and s.place == number and s.stage is Stage.MAPPED)
        successor = next(ready, None)
        if successor is None:
            return [do.Kill(number)]
        self.workers[number].recycled += 1
        return self._succeed(number, successor, now_s, said.message.ending)

    def _succeed(self, number: int, successor: int, now_s: float, ending: bytes = b"") -> Instructions:
        """The successor takes the worker's place; the worker closes its envs and ends, if it has not ended."""
        worker, spare = self.workers[number], self.spares.pop(successor)
        if worker.alive:
            self.spares[successor] = left = worker.as_spare(number)
            left.stage = Stage.LEAVING
            left.kill_at_s = now_s + self.make.faults.close_s
        worker.detector, worker.stage, worker.moving = spare.detector, spare.stage, spare.moving
        worker.restart_at_s = math.inf
        swapped: Instructions = [do.SwapProcesses(number, successor, recycled=worker.loss is None)]
        if successor in self.spares:
            swapped.append(do.Tell(successor, control.CloseEnvs()))
        if worker.stage is Stage.MAPPED:
            self._restarts.serves(number, now_s)
        if self.phase is Phase.HANDING_OVER:
            return [*swapped, *self._advance_takeover(False, now_s)]
        if worker.stage is Stage.MAPPED:
            swapped += self._hand_over(number, now_s, ending)
        return [*swapped, *self._recycle(now_s)]

    # --- time ---------------------------------------------------------------------------------------------------------

    def _on_elapsed(self, elapsed: stimuli.Elapsed, now_s: float) -> Instructions:
        instructions: Instructions = []
        for number, worker in enumerate(self.workers):
            instructions += self._judge(number, worker, elapsed, now_s)
            if now_s >= worker.finish_at_s:
                worker.finish_at_s = math.inf
                assert worker.loss is not None
                instructions.append(do.FinishSteps(number, worker.loss))
        for number, spare in self.spares.items():
            instructions += self._judge(number, spare, elapsed, now_s)
        self._plan_next_sample(elapsed, now_s)
        instructions += self._limit_memory(elapsed.memory, now_s)
        self._quiescent = elapsed.quiescent
        if self.lane is LaneName.WIRE and elapsed.quiescent:
            instructions += self._take_drive()
        due = [number for number, worker in enumerate(self.workers) if now_s >= worker.restart_at_s]
        instructions += self._advance_takeover(elapsed.quiescent, now_s)
        instructions += self._start(due, now_s)
        if now_s >= self._spares_at_s:
            instructions += self._make_spares(now_s)
        instructions += self._note_worn(elapsed.memory, now_s)
        return [*instructions, *self._recycle(now_s)]

    def _limit_memory(self, memory: Mapping[int, int], now_s: float) -> Instructions:
        """End the workers that have more memory than they may."""
        if not self.measures(now_s):
            return []
        self._memory_at_s = now_s + MEMORY_S
        killed: Instructions = []
        bytes_max = self.rules.hosting.memory_max or math.inf
        processes = self._processes()
        for number, nbytes in memory.items():
            worker = processes.get(number)
            if worker is not None and nbytes > bytes_max and worker.alive and worker.overrun is None:
                worker.overrun = Overrun(nbytes, int(bytes_max))
                killed.append(do.Kill(number))
        return killed

    def overruns(self, number: int) -> bool:
        """Whether this worker is about to end for the memory that it has."""
        worker = self._processes().get(number)
        return worker is not None and worker.overrun is not None

    def _on_quota_overrun(self, found: stimuli.QuotaOverrun, now_s: float) -> Instructions:
        worker = self._processes().get(found.worker)
        if worker is None or not worker.alive or worker.overrun is not None:
            return []
        worker.overrun = found.overrun
        return [do.Kill(found.worker)]

    def _plan_next_sample(self, elapsed: stimuli.Elapsed, now_s: float) -> None:
        """Soon, or, where the client drives and steps nothing, the later the longer that lasts."""
        if not self._samples:
            self._sample_at_s = math.inf
            return
        idle = self.driver is Driver.CLIENT and elapsed.quiescent and self._takeover is Takeover.NONE
        self._idle_samples = self._idle_samples + 1 if idle else 0
        faults = self.make.faults
        longest_s = min(SAMPLE_IDLE_S, faults.init_s / 4, faults.step_s / 4, faults.reset_s / 4)
        self._planned_s = max(SAMPLE_S, min(longest_s, SAMPLE_S * self._idle_samples))
        self._sample_at_s = now_s + self._planned_s

    def _judge(self, number: int, worker: WorkerState, elapsed: stimuli.Elapsed, now_s: float) -> Instructions:
        """Report an env that does not return, and end its worker once its time is over."""
        if worker.stage is Stage.LEAVING or worker.late is not None:
            if now_s < worker.kill_at_s:
                return []
            worker.kill_at_s = math.inf
            return [do.Kill(number)]
        progress = elapsed.progress[number] if number < len(self.workers) else None
        late = self._sample(worker, progress, now_s) if worker.alive else None
        if late is None:
            return []
        if late.over:
            worker.late, worker.kill_at_s = late, now_s + STACKS_S
        return [do.ReportLate(number, late)]

    def _sample(self, worker: WorkerState, progress: Progress | None, now_s: float) -> Late | None:
        detector, rows, planned_s = worker.detector, worker.rows, self._planned_s
        if worker.moving or worker.stage is Stage.MAPPING:
            return detector.sample(now_s, planned_s, "init", rows[0], NO_TURN)
        if worker.stage is Stage.BUILDING:
            return detector.sample(now_s, planned_s, "init", rows[min(worker.built, len(rows) - 1)], worker.built)
        if progress is not None and isinstance(worker.pending, _CALLS):
            return detector.sample(now_s, planned_s, "call", progress.row, progress.turn)
        if progress is not None and progress.kind:
            return detector.sample(now_s, planned_s, progress.kind, progress.row, progress.turn)
        detector.rest()  # it waits for the others, or for a request
        return None

    def _on_elapsed_over(self, elapsed: stimuli.Elapsed, now_s: float) -> Instructions:
        if self.phase is not Phase.CLOSING or now_s < self._close_by_s:
            return []
        self._close_by_s = math.inf
        late = f"its envs did not close within close_timeout={self.make.faults.close_s:g} s and were killed"
        why = Failure("session_lost", "session", late)
        killed = do.Warn("session_killed", {"close_s": self.make.faults.close_s})
        return [killed, *self._answered(do.Fail(why)), *self._close(now_s, terminate=True)]

    # --- who drives ---------------------------------------------------------------------------------------------------

    def _on_side_connected(self, connected: stimuli.SideConnected, now_s: float) -> Instructions:
        free = self.lane is LaneName.WIRE and self.driver is Driver.HUB and self._takeover is Takeover.NONE
        if not (free and self._idle and connected.quiescent):
            return [do.RefuseSide()]
        self.lane, self.driver, self._lent = LaneName.SHARED, Driver.CLIENT, True
        self._sample_at_s, self._idle_samples = now_s + SAMPLE_S, 0
        return [do.Grant(), do.GiveDrive()]

    def _on_side_closed(self, closed: stimuli.SideClosed, now_s: float) -> Instructions:
        self.lane = LaneName.WIRE
        return [do.CloseSide(), *(self._take_drive() if closed.quiescent else [])]

    def _revoked(self) -> Instructions:
        return [do.Revoke()] if self.lane is LaneName.SHARED else []

    # --- takeover -----------------------------------------------------------------------------------------------------

    def _on_attached(self, attached: stimuli.Attached, now_s: float) -> Instructions:
        first = self._takeover is Takeover.NONE
        if first:
            self._takeover = Takeover.WAITING
        self._plan_sample(now_s)
        shared = self.lane is LaneName.SHARED
        revoked = [*self._revoked(), do.CloseSide()]
        self.lane = LaneName.WIRE
        if self.phase in _OVER:
            return [*revoked, *self._fail_takeover()]
        if shared:  # its client may have posted rows until now
            self._sample_at_s = now_s
            return revoked
        return [*revoked, *(self._advance_takeover(attached.quiescent, now_s) if first else [])]

    def _advance_takeover(self, quiescent: bool, now_s: float) -> Instructions:
        """Go on with a takeover, as far as it goes now."""
        if self._takeover is Takeover.WAITING and self.phase is Phase.READY and not self.asked and quiescent:
            if not self._lent:
                self._takeover, self.driver, self._parts_out = Takeover.NONE, Driver.HUB, 0
                return [do.TakeDrive(), do.AnswerAttach()]
            self._takeover, self.phase = Takeover.MOVING, Phase.HANDING_OVER
            return [do.MakeOtherArena()]
        moving = any(worker.moving for worker in self._processes().values())
        if self._takeover is Takeover.MOVING and self._other_made and not moving:
            return self._moved(now_s)
        return []

    def _on_other_arena(self, _: stimuli.OtherArenaMade, now_s: float) -> Instructions:
        self._other_made = True
        given: Instructions = []
        for number, worker in enumerate(self.workers):
            if worker.stage in (Stage.SERVING, Stage.MAPPING, Stage.MAPPED):
                given.append(self._give_arena(number))
                worker.moving = True
        for number, spare in self.spares.items():
            if spare.stage in (Stage.MAPPING, Stage.MAPPED):
                given.append(self._give_arena(number, spare.place))
                spare.moving = True
        return [*given, *self._advance_takeover(False, now_s)]

    def _on_other_arena_refused(self, refused: stimuli.OtherArenaRefused, now_s: float) -> Instructions:
        self.phase = Phase.READY
        mapped = [number for number, worker in enumerate(self.workers) if worker.stage is Stage.MAPPED]
        why = f"no memory for a takeover is available: {refused.reason}"
        handed = [each for number in mapped for each in self._hand_over(number, now_s)]
        return [*handed, *self._fail_takeover(Failure("limit", "hub", why))]

    def _on_other_arena_late(self, _: stimuli.OtherArenaMade, now_s: float) -> Instructions:
        return [do.DropOtherArena()]

    def _moved(self, now_s: float) -> Instructions:
        """No worker uses the first arena any more, whatever its client may still post there.

        The client may have posted rows while some of the workers still used it. Those that are pending are pending in
        the second arena, too, so that no batch is left half done; the takeover waits for them.
        """
        self.phase, self._lent, self._other_made = Phase.READY, False, False
        self._takeover, self.driver, self._sample_at_s = Takeover.WAITING, Driver.HUB, now_s
        instructions: Instructions = [do.UseOtherArena()]
        for number, worker in enumerate(self.workers):
            if worker.stage is Stage.SERVING:
                instructions.append(do.Tell(number, control.Serve(moved=True)))
            elif worker.stage is Stage.MAPPED:
                instructions += self._hand_over(number, now_s)
        return instructions

    def _fail_takeover(self, why: Failure | None = None) -> Instructions:
        """Tell the client that takes over why it does not get the session."""
        if self._takeover is Takeover.NONE:
            return []
        drop: Instructions = [do.DropOtherArena()] if self._other_made else []
        self._takeover, self._other_made = Takeover.NONE, False
        lost = Failure("session_lost", "session", "the session has broken; make another")
        return [*drop, do.FailAttach(why or lost)]

    # --- the end ------------------------------------------------------------------------------------------------------

    def _on_close(self, request: Requested, now_s: float) -> Instructions:
        self._failure, self._receiving = None, 0  # what came before CLOSE is not told any more
        return self._close(now_s, request.message.terminate)

    def _close(self, now_s: float, terminate: bool) -> Instructions:
        """End the session: close its envs in time, or kill its workers."""
        first = self.phase is not Phase.CLOSING
        instructions: Instructions = []
        if first:
            self.phase = Phase.CLOSING
            self._close_by_s = min(now_s + self.make.faults.close_s, self._end_by_s)
            instructions += [*self._revoked(), *self._fail_takeover()]
        alive = {number: worker for number, worker in self._processes().items() if worker.alive}
        if not alive:
            return [*instructions, *self._ended()]
        if terminate:
            return [*instructions, *map(do.Kill, alive)]
        if not first:
            return instructions
        # A worker that makes its envs would read that only afterwards, and nobody has used them.
        making = [number for number, worker in alive.items() if worker.stage is Stage.BUILDING]
        told = [do.Tell(number, control.CloseEnvs()) for number in alive if number not in making]
        return [*instructions, *told, *map(do.Kill, making)]

    def _ended(self) -> Instructions:
        self.phase = Phase.ENDED
        answer = do.Answer(messages.Done()) if self._failure is None else do.Fail(self._failure)
        return [*self._answered(answer), do.End()]

    def _on_abandoned(self, abandoned: stimuli.Abandoned, now_s: float) -> Instructions:
        return self._abandon(abandoned.why, now_s)

    def _abandon(self, why: Failure, now_s: float, terminate: bool = True) -> Instructions:
        """End the session without its client's wish; a request under way, as that which makes it, is told ``why``."""
        return [*self._answered(do.Fail(why)), *self._close(now_s, terminate)]

    def _on_lease_expired(self, expired: stimuli.LeaseExpired, now_s: float) -> Instructions:
        why = Failure("session_lost", "session", "its lease ran out")
        # An env that is at work may hang, and then does not close, either.
        return self._abandon(why, now_s, terminate=not self._is_idle(expired.quiescent))

    def _on_draining(self, draining: stimuli.Draining, now_s: float) -> Instructions:
        self._drain_by_s = min(self._drain_by_s, draining.by_s)
        self._end_by_s = min(self._end_by_s, draining.end_by_s)
        if self.phase is Phase.CLOSING:
            self._close_by_s = min(self._close_by_s, self._end_by_s)
        self._quiescent = draining.quiescent
        self._plan_sample(now_s)
        wind_up: Instructions = [do.WindUp()] if self.lane is LaneName.SHARED else []
        return wind_up

    def _drained(self, now_s: float) -> Instructions:
        """End the session of a hub that shuts down, as soon as nothing is under way, or the time is over."""
        if self.phase in (Phase.CLOSING, Phase.ENDED):
            self._drain_by_s = math.inf
            return []
        idle = self._is_idle(self._quiescent)
        if not idle and now_s < self._drain_by_s:
            return []
        self._drain_by_s = math.inf
        answered = self._answered(do.Fail(SHUTTING_DOWN))
        return [*answered, do.Goodbye(SHUTTING_DOWN), *self._close(now_s, terminate=not idle)]


class IllegalStimulus(Exception):
    """A stimulus that cannot come in its session's phase."""


def _refusal(message: str) -> Failure:
    return Failure("refused", "request", message)


def _dropped(said: WorkerSaid) -> do.Warn:
    """A worker has answered what is no longer asked for."""
    kind, number = type(said.message).__name__, said.message.number
    return do.Warn("stale_answer_dropped", {"worker": said.worker, "message": kind, "of": number})


_POST_STEP: Instructions = [do.PostStep()]
_OUTCOME = do.Answer(messages.Done(), arrays=True)  # of a reset or a step

# --- which stimulus is handled in which phase -------------------------------------------------------------------------

Handler = Callable[[SessionState, Any, float], Instructions]
Rule = tuple[Any, ...]  # the handler, and the phases that may follow besides the one in which the stimulus comes

_S, _P = SessionState, Phase
_SERVING = (_P.READY, _P.MOVING, _P.CALLING, _P.HANDING_OVER)
_LIVE = (*_MAKING, *_SERVING, _P.BROKEN, _P.CLOSING)
_GONE = (_P.BROKEN, _P.CLOSING)


def _in(phases: Collection[Phase], *rule: Any) -> dict[Phase, Rule]:
    return dict.fromkeys(phases, rule)


def _request(*rule: Any) -> dict[Phase, Rule]:
    """A request that is carried out in READY; the protocol admits none but CLOSE while another is under way."""
    return {_P.READY: rule, _P.BROKEN: (_S._on_broken_request,), _P.CLOSING: (_S._on_closing_request,)}


def _ending(handler: Any) -> dict[Phase, Rule]:
    """What ends the session, at once where no worker is left."""
    early, late = _in(_MAKING, handler, _P.CLOSING), _in([*_SERVING, _P.BROKEN], handler, _P.CLOSING, _P.ENDED)
    return early | late | {_P.CLOSING: (handler,)}


# Once the hub drains, CLOSING or ENDED may follow every stimulus that finds the session idle.
TABLE: Mapping[type, Mapping[Phase, Rule]] = {
    # Of the client and the hub.
    stimuli.SessionMade: _in([_P.BUILDING], _S._on_made),
    Step: _request(_S._on_step, _P.MOVING),
    Reset: _request(_S._on_reset, _P.MOVING),
    Call: _request(_S._on_call, _P.CALLING),
    SetAttr: _request(_S._on_set_attr, _P.CALLING),
    Send: _request(_S._on_send),
    Receive: _request(_S._on_receive),
    Collect: _request(_S._on_collect),
    TemplatesRequest: _request(_S._on_templates),
    HopsRequest: _in([_P.READY, *_GONE], _S._on_hops),
    Close: _ending(_S._on_close),
    stimuli.Attached: _in([*_SERVING, *_GONE], _S._on_attached) | _in([_P.READY], _S._on_attached, _P.HANDING_OVER),
    stimuli.SideConnected: _in(_LIVE, _S._on_side_connected),
    stimuli.SideClosed: _in(_LIVE, _S._on_side_closed),
    stimuli.LeaseExpired: _ending(_S._on_lease_expired),
    stimuli.Draining: _ending(_S._on_draining),
    stimuli.Abandoned: _ending(_S._on_abandoned),
    stimuli.QuotaOverrun: _in(_LIVE, _S._on_quota_overrun),
    # What came of an instruction.
    stimuli.WorkersNotStarted: _in(_MAKING, _S._on_not_started, _P.CLOSING, _P.ENDED)
    | _in(_SERVING, _S._on_not_started, _P.BROKEN)
    | _in([_P.BROKEN], _S._on_not_started)
    | _in([_P.CLOSING], _S._on_not_started, _P.ENDED),
    stimuli.ArenaRefused: _in([_P.MAPPING], _S._on_arena_refused, _P.CLOSING) | _in([_P.CLOSING], _S._on_nothing),
    stimuli.OtherArenaMade: _in([_P.HANDING_OVER], _S._on_other_arena, _P.READY) | _in(_GONE, _S._on_other_arena_late),
    stimuli.OtherArenaRefused: _in([_P.HANDING_OVER], _S._on_other_arena_refused, _P.READY)
    | _in(_GONE, _S._on_nothing),
    stimuli.ActionsRefused: _in(_LIVE, _S._on_actions_refused) | _in([_P.MOVING], _S._on_actions_refused, _P.READY),
    stimuli.PartPosted: _in(_LIVE, _S._on_part_posted),
    stimuli.PartDone: _in(_LIVE, _S._on_part_done),
    stimuli.StandInFailed: _in(_SERVING, _S._on_stand_in_failed) | _in(_GONE, _S._on_nothing),
    stimuli.StandInInfo: _in(_LIVE, _S._on_stand_in_info),
    stimuli.RowsWaiting: _in(_LIVE, _S._on_rows_waiting),
    # Of the arena and of time.
    stimuli.RowsDone: _in(_LIVE, _S._on_nothing) | _in([_P.MOVING], _S._on_rows_done, _P.READY, _P.HANDING_OVER),
    stimuli.Elapsed: _in([*_MAKING, *_SERVING], _S._on_elapsed)
    | _in([_P.READY], _S._on_elapsed, _P.HANDING_OVER)
    | _in(_GONE, _S._on_elapsed_over),
    # Of workers. What is missing here is ignored: it was sent before the worker knew of the phase.
    WorkerExited: _in(_MAKING, _S._on_exited, _P.CLOSING, _P.ENDED)
    | _in([_P.READY, _P.MOVING], _S._on_exited, _P.BROKEN)
    | _in([_P.CALLING], _S._on_exited, _P.READY, _P.HANDING_OVER, _P.BROKEN)
    | _in([_P.HANDING_OVER], _S._on_exited, _P.READY, _P.BROKEN)
    | _in([_P.BROKEN], _S._on_exited)
    | _in([_P.CLOSING], _S._on_exited, _P.ENDED),
    control.Building: _in([_P.BUILDING, *_SERVING], _S._on_building),
    control.Imported: _in([_P.BUILDING], _S._on_imported),
    control.FirstBuilt: _in([_P.BUILDING], _S._on_first_built),
    control.Built: _in(_SERVING, _S._on_built_again) | _in([_P.BUILDING], _S._on_built, _P.MAPPING, _P.CLOSING),
    control.Mapped: _in(_SERVING, _S._on_mapped)
    | _in([_P.HANDING_OVER], _S._on_mapped, _P.READY)
    | _in([_P.MAPPING], _S._on_first_mapped, _P.READY),
    control.RowInfo: _in(_SERVING, _S._on_row_info),
    control.InfoTemplate: _in(_SERVING, _S._on_template),
    control.RowFailed: _in(_MAKING, _S._on_making_failed, _P.CLOSING)
    | _in(_SERVING, _S._on_row_failed)
    | _in([_P.CLOSING], _S._on_closing_failed),
    **dict.fromkeys(
        [control.CallResults, control.CallFailed],
        _in(_SERVING, _S._on_call_answered) | _in([_P.CALLING], _S._on_call_answered, _P.READY, _P.HANDING_OVER),
    ),
    control.StepTimes: _in(_LIVE, _S._on_step_times),
    control.SharedChanged: _in(_LIVE, _S._on_shared_changed),
    control.Faulted: _in(_SERVING, _S._on_faulted, _P.BROKEN),
    control.EpisodesDone: _in(_SERVING, _S._on_episodes_done),
    control.Left: _in(_SERVING, _S._on_left) | _in([_P.HANDING_OVER], _S._on_left, _P.READY),
    control.Suspicious: _in(_LIVE, _S._on_nothing),
}


def diagram() -> str:
    """The transitions between two phases and the stimuli that may cause them, as a Mermaid state diagram."""
    edges: dict[tuple[str, str], list[str]] = {}
    for kind, rules in TABLE.items():
        for phase, (_, *following) in rules.items():
            for other in following:
                if other is not phase:
                    edges.setdefault((phase.name, other.name), []).append(kind.__name__)
    lines = [f"    {before} --> {after}: {', '.join(kinds)}" for (before, after), kinds in sorted(edges.items())]
    return "\n".join(["stateDiagram-v2", "    [*] --> BUILDING", *lines, "    ENDED --> [*]"])
