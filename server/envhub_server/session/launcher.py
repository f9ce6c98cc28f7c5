"""The start of processes, and the orders by which each learns its slot, its envs and the arena."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from envhub.protocol.messages import Hosting, Make, ProgramEnvironment
from envhub_server.catalog.registry import Recipe
from envhub_server.ipc import control
from envhub_server.processes.interpreter import ONE_THREAD, InterpreterKey
from envhub_server.session.effects import Effects
from envhub_server.session.slots import Deadlines, Process, Slot, SlotTable, Stage

# The variables by which libraries choose a device: CUDA sees only these devices, MuJoCo and others render on this one.
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "EGL_DEVICE_ID")
# Mesa draws without threads and shared memory, which no copy of a process has.
MESA = {"LP_NUM_THREADS": "0", "MESA_SHADER_CACHE_DISABLE": "true"}
_OF_INTERPRETER = ("python", "rendering", "flags")  # set when the interpreter starts
SPARE_INCARNATION = 1 << 20  # more than a worker has restarts
WINDOW_S = 60.0  # an end counts for this long
DELAY_S = 0.1  # before the first restart in a row; it doubles with each further one
DELAY_MAX_S = 10.0  # upper limit of the delay
JITTER = 0.2  # each delay varies by up to this fraction, so that workers do not all start at the same time
STABLE_S = 1.0  # a process that has served for this long starts a new row of restarts
BOOTS_MAX = 3  # consecutive failures of a slot's processes to build its envs
ALL_MAX = 10  # least limit of restarts of all slots of a session within the window


class Restarts:
    """The ends of the processes of one session, by slot: the delay of each restart, and their limit.

    A slot whose process served for a while gets the next one almost at once; the delay grows with each restart in a
    row, as supervisord's. The limit follows Erlang/OTP's restart intensity: ``restarts_max`` ends in a slot within the
    window are each followed by a restart, and the next end is final. The ends in all slots together have a limit too:
    one per env, but no less than the limit of one slot.
    """

    def __init__(self, restarts_max: int, num_envs: int, uniform: Callable[[float, float], float]) -> None:
        """Count the ends of the processes of ``num_envs`` envs; the jitter is drawn from ``uniform``."""
        self._restarts_max = restarts_max
        self._all_max = max(ALL_MAX, num_envs, restarts_max)
        self._uniform = uniform
        self._ends_s: defaultdict[int, deque[float]] = defaultdict(deque)
        self._all_s: deque[float] = deque()
        self._row: Counter[int] = Counter()  # restarts in a row
        self._boots: Counter[int] = Counter()
        self._serving_since_s: dict[int, float] = {}
        self._count: Counter[int] = Counter()

    def count(self, slot: int) -> int:
        return self._count[slot]

    def count_text(self, slot: int) -> str:
        """The number of failures in the slot, and in all slots if that number was too high, as text for users."""
        text = f"it failed {self._count[slot]} times"
        if len(self._ends_s[slot]) > self._restarts_max or len(self._all_s) <= self._all_max:
            return text
        return f"{text}, and all workers of this session {len(self._all_s)} times within {WINDOW_S:g} s,"

    def serves(self, slot: int, now_s: float) -> None:
        self._serving_since_s[slot] = now_s
        self._boots.pop(slot, None)

    def ended(self, slot: int, now_s: float, started: bool = True) -> float | None:
        """Note an end; return the seconds until the restart, or None if the budget is spent."""
        # A process that was not ``started``, for want of descriptors for example, says nothing about the envs, and
        # takes nothing of the budget.
        self._count[slot] += 1
        since_s = self._serving_since_s.pop(slot, None)
        if not started:
            return self._next_delay_s(slot)
        if since_s is None:
            self._boots[slot] += 1
            if self._boots[slot] >= BOOTS_MAX:
                return None
        elif now_s - since_s >= STABLE_S:
            self._row.pop(slot, None)
        if self._is_spent(slot, now_s):
            return None
        return self._next_delay_s(slot)

    def _next_delay_s(self, slot: int) -> float:
        delay_s = min(DELAY_MAX_S, DELAY_S * 2.0 ** min(self._row[slot], 64))
        self._row[slot] += 1
        return delay_s * (1 + self._uniform(-JITTER, JITTER))

    def faulted(self, slot: int, now_s: float) -> bool:
        """Note that a serving process rebuilt an env; return True if the budget of its slot allows that."""
        self._count[slot] += 1
        return not self._is_spent(slot, now_s)

    def _is_spent(self, slot: int, now_s: float) -> bool:
        own_s, all_s = self._ends_s[slot], self._all_s
        return _spent(own_s, self._restarts_max, now_s) or _spent(all_s, self._all_max, now_s)


def _spent(ends_s: deque[float], limit: int, now_s: float) -> bool:
    while ends_s and ends_s[0] <= now_s - WINDOW_S:
        ends_s.popleft()
    ends_s.append(now_s)
    return len(ends_s) > limit


@dataclass(frozen=True)
class Machine:
    """The part of the machine that a session may use."""

    affinity: tuple[int, ...]  # the CPUs' numbers
    cpus: int  # the number of usable CPUs
    quota: bool = False  # True if a cgroup limits the CPU time
    workers_max: int = 1 << 20  # the number of workers that the session's share of descriptors and processes allows
    memory_bytes: int = 1 << 50  # the available memory


@dataclass(frozen=True)
class WorkerCount:
    """A number of workers, and the reason for it."""

    workers: int  # the number
    reason: str  # the reason for the number, for people
    chosen: bool = False  # True if a user or a rule fixed the number, so that later sessions do not adapt it
    crowded: bool = False  # True if envs share processes only because there is no room for more


@dataclass(frozen=True)
class WorkerRules:
    """Settings of every worker of a session."""

    memory_bytes_max: int = 0  # of a worker's own memory; 0 for no limit
    hide_folders: bool = False  # True if failures sent to the client must not name folders of this machine
    session: str = ""  # the session's name for its envs; empty for envs that get no variables
    hosting: Hosting = field(default_factory=Hosting)
    replays: str = ""  # the prefix of the names of the session's replays; empty if none are kept
    shares_imports: bool = False  # True if the others are to have what the first worker has imported, where they can
    has_zygote: bool = False  # True if that of an earlier session has imported it
    info_bytes_max: int = control.INFO_BYTES_MAX  # without its observation, for a hub that is not private
    slow_ms: int = 0  # the hub lists steps, resets and calls that take as long; 0 for none
    snapshots_max: int = 256  # processes that are snapshots; 0 forbids them


# Fields of MAKE that a worker gets as they are.
OF_MAKE = (
    *("kwargs", "factories", "python", "autoreset_mode", "observation_mode", "runner", "wrappers", "wrapper_kwargs"),
    *("columns", "row_offset", "snapshots"),
)


def interpreter_of(own: InterpreterKey, program_environment: ProgramEnvironment | None) -> InterpreterKey:
    """The interpreter of a session's workers: the env's own, with its program's options, if it has one."""
    return own if program_environment is None else replace(own, flags=tuple(program_environment.flags))


def _program_environment(program_environment: ProgramEnvironment | None, recipe: Recipe) -> dict[str, Any]:
    """The fields of Build by which a worker adopts the program's environment; none for an interpreter of its own."""
    if program_environment is None:
        return {}
    if recipe.settings.python:
        return {"generators": program_environment.generators}
    inherited = {name: value for name, value in vars(program_environment).items() if name not in _OF_INTERPRETER}
    return {
        **inherited,
        "environ": {**ONE_THREAD, **program_environment.environ, **dict(recipe.settings.interpreter.variables)},
    }


class Launcher:
    """Starts the processes of a session. The objects that have processes made or replaced read what it was given."""

    def __init__(
        self, make: Make, recipe: Recipe, rules: WorkerRules, machine: Machine, restarts: Restarts, effects: Effects
    ) -> None:
        # The client's MAKE, and the recipe with the operator's settings.
        self.make, self.recipe, self.machine = make, recipe, machine
        self.slots, self.deadlines = SlotTable(make.num_envs, make.faults), Deadlines()
        self.restarts, self.effects = restarts, effects
        self._spares = 0  # that were started
        self.rules = rules  # the settings of all of its workers
        self.count: WorkerCount | None = None  # the number of workers and the reason for it; None until it is decided
        self.arena: control.MapArena | None = None  # the order to map the arena; None until all envs are made
        # True if the session has a zygote, which forks its other processes; None until its first worker decides that.
        has_setup = bool(self._setups or make.worker_setup_code)
        several = make.num_envs > 1 or rules.has_zygote
        shares = rules.shares_imports and several and not rules.hosting.gpus and not has_setup
        self.has_zygote: bool | None = (rules.has_zygote or None) if shares else False

    def start(self, slots: Collection[Slot], now_s: float, spare: bool = False) -> None:
        """Start a process for each of these slots, which must have none; or a spare with envs like theirs."""
        if not slots:
            return
        self.deadlines.plan_sample(now_s)
        started, shares = [self.slots.begin(slot, spare) for slot in slots], bool(self.has_zygote)
        for process in started:
            process.shares_imports = shares
        self.effects.start_processes(tuple(process.number for process in started), spare, shares)
        for process in started:
            order = self.order(self.slots[process.slot_index])
            if spare:
                self._spares += 1
                order = replace(order, incarnation=SPARE_INCARNATION + self._spares)
            self.effects.tell(process.number, order)

    def start_missing(self, now_s: float) -> None:
        self.start([slot for slot in self.slots if slot.process is None], now_s)

    def start_restored(
        self, slot: Slot, serial: int, name: str, requests: bytes | None, now_s: float, spare: bool
    ) -> Process:
        """Start a copy of a snapshot for this slot; a ``spare`` leaves it to its present process until it is ready.

        It makes ``requests``, if it is given them, to come to the snapshot of this name.
        """
        self.deadlines.plan_sample(now_s)
        process = self.slots.begin(slot, spare)
        process.is_restored = True
        self.effects.start_restored(process.number, serial)
        self.assign_slot(process)
        if requests is not None:
            self.effects.repeat_requests(process.number, name, requests)
        self.map(process)
        return process

    # --- orders -------------------------------------------------------------------------------------------------------

    def order(self, slot: Slot) -> control.Build:
        """The order to make the envs of this slot; only the first env if the number of workers is not decided."""
        make, recipe, rules = self.make, self.recipe, self.rules
        workers = 1 if self.count is None else len(self.slots)
        return control.Build(
            worker=slot.index,
            rows=list(slot.rows),
            name=recipe.name,
            kwargs_each=self._kwargs_each(slot),
            entry=recipe.entry,
            modules=list(recipe.modules),
            allow_pickle=make.program_environment is not None and not recipe.settings.python,
            first_only=self.count is None,
            says_imported=self.has_zygote is None,
            cpu=self._cpu(slot),
            on_exception=make.faults.on_exception,
            on_invalid=make.faults.on_invalid,
            memory_bytes_max=rules.memory_bytes_max,
            hide_folders=rules.hide_folders,
            variables=self._variables(slot),
            batch_workers=workers if recipe.settings.vector else 0,
            replays=rules.replays,
            episodes_max=rules.hosting.recycle.episodes,
            setups=self._setups,
            setup=make.worker_setup_code,
            info_bytes_max=rules.info_bytes_max,
            incarnation=self.restarts.count(slot.index) + slot.recycled,
            **{name: getattr(make, name) for name in OF_MAKE},
            **_program_environment(make.program_environment, recipe),
        )

    def order_rest(self, slot: Slot) -> control.BuildRest:
        """The order to make the other envs, for a worker that has made its first env, once its slot is decided."""
        return control.BuildRest(list(slot.rows), self._kwargs_each(slot), self._variables(slot))

    @property
    def _setups(self) -> list[str]:
        return [*dict.fromkeys(filter(None, (self.recipe.settings.worker_setup, self.make.worker_setup)))]

    def _kwargs_each(self, slot: Slot) -> list[bytes]:
        return [self.make.kwargs_each[row] for row in slot.rows] if self.make.kwargs_each else []

    def _cpu(self, slot: Slot) -> int | None:
        affinity = self.machine.affinity
        return affinity[slot.index % len(affinity)] if self.make.pin else None

    def _variables(self, slot: Slot) -> dict[str, str]:
        """The environment variables of the worker of this slot; they are the same for its replacements."""
        # The number of workers and the envs' indices are empty until they are decided.
        mesa = MESA if self.make.snapshots else {}
        if not self.rules.session:
            return mesa
        indices = ",".join(str(self.make.row_offset + row) for row in slot.rows)
        environment = {
            **mesa,
            "ENVHUB_SESSION": self.rules.session,
            "ENVHUB_WORKER_INDEX": str(slot.index),
            "ENVHUB_NUM_WORKERS": "" if self.count is None else str(len(self.slots)),
            "ENVHUB_ENV_INDICES": "" if self.count is None else indices,
        }
        if gpus := self.rules.hosting.gpus:
            environment.update(dict.fromkeys(DEVICE_VARIABLES, str(gpus[slot.index % len(gpus)])))
        return environment

    # --- a process in its place ---------------------------------------------------------------------------------------

    def assign_slot(self, process: Process) -> None:
        slot = self.slots[process.slot_index]
        order = control.TakeSlot(slot.index, slot.rows, self._variables(slot), self._cpu(slot))
        self.effects.tell(process.number, order)

    def map(self, process: Process) -> None:
        process.stage = Stage.MAPPING
        assert self.arena is not None
        self.effects.give_arena(process.number, process.slot_index, self.arena)
