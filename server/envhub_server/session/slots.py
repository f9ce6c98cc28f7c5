"""The slots of a session, and the processes that serve them.

A slot is a worker's place in its session: an index, rows, losses and restarts. A process has a number that is unique in
its session. It serves one slot or, as a spare or while it leaves, no slot.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from envhub.arena.memory import FIRST_CALL
from envhub.protocol.messages import Failure, Faults
from envhub_server.ipc import control

SAMPLE_S = 0.1  # between two samples of the arena while envs run
SLOW_S = 30.0  # a longer call is reported to the operator, once
INTERVALS_MAX = 2.0  # a sample counts for at most this many planned intervals


@dataclass(frozen=True)
class Progress:
    """Progress of a serving worker, read from the arena's words."""

    word: int  # its progress word, which changes before every call into an env
    row: int  # the env that the word names, or the worker's first env if it names none of them
    kind: str  # ``init``, ``reset``, ``step`` or ``call`` of a pending row; empty if all rows are done

    @property
    def verb(self) -> str:
        """The kind, but the first step of an env is one, too."""
        return "step" if self.kind == "init" else self.kind

    @property
    def is_first(self) -> bool:
        """True if the env is made again, or was not stepped yet."""
        return bool(self.word & FIRST_CALL)


@dataclass(frozen=True)
class Late:
    """An env that has not returned."""

    kind: str  # the operation: ``init``, ``reset``, ``step`` or ``call``
    row: int  # the env's row
    waited_s: float  # the duration so far, without the time that late samples leave out
    limit_s: float  # its deadline

    @property
    def expired(self) -> bool:
        """True if the deadline has passed, so that the worker must be ended."""
        return self.waited_s >= self.limit_s


@dataclass(frozen=True)
class Overrun:
    """A worker exceeded its memory limit ``bytes_max``."""

    nbytes: int
    bytes_max: int


@dataclass(frozen=True)
class Ordered:
    """Somebody has ordered that a worker is ended and started again."""

    text: str  # follows the worker's name: who has, and why


KilledFor = Late | Overrun | Ordered


@dataclass(frozen=True)
class WorkerLoss:
    """Failure in the results of an ended worker's rows."""

    failure: Failure  # the failure; each row reports it with its own ``env_index``
    raises: bool  # True if the step raises; else it is a truncation
    info: bytes  # the encoded info of a truncated row


class HangDetector:
    """Judges the samples of one worker: finds an env that does not return.

    A worker stores which env it runs, and the hub samples that word: while it sees the same env in the same call, that
    env has not returned. So a worker of many slow envs does not hang. A sample counts for at most twice the planned
    interval, because the hub may be the first process to continue after a pause of the whole machine.
    """

    def __init__(self, faults: Faults) -> None:
        self._limits_s = {kind: getattr(faults, f"{kind}_s") for kind in ("init", "reset", "step", "call")}
        self.rest()

    def rest(self) -> None:
        self._last_sample: tuple[str, int] | None = None
        self._sampled_s = 0.0
        self.waited_s = 0.0  # since a sample found it first in the call of the last one
        self._reported = False

    def sample(self, now_s: float, planned_s: float, kind: str, row: int, word: int) -> Late | None:
        """Note the worker's progress; return a late env once when it is slow, and again when its deadline has passed.

        The sample was planned for ``planned_s`` after the last one.
        """
        passed_s, self._sampled_s = now_s - self._sampled_s, now_s
        if (kind, word) != self._last_sample:
            self._last_sample, self.waited_s, self._reported = (kind, word), 0.0, False
            return None
        self.waited_s += min(passed_s, INTERVALS_MAX * planned_s)
        late = Late(kind, row, self.waited_s, self._limits_s[kind])
        if late.expired or (late.waited_s >= SLOW_S and not self._reported):
            self._reported = True
            return late
        return None


class Stage(enum.Enum):
    """The state of a process."""

    BUILDING = "building"  # it makes its envs
    BUILT = "built"  # its envs exist, and it waits for the arena
    MAPPING = "mapping"  # it maps the arena
    MAPPED = "mapped"  # it waits for its rows
    SERVING = "serving"  # it serves the rows of its slot
    LEAVING = "leaving"  # it has left its rows, and closes its envs


@dataclass(eq=False)
class Process:
    """One process of a session."""

    number: int  # its number, unique in the session
    slot_index: int  # the index of the slot that it serves, served, or was made for
    detector: HangDetector  # judges its progress
    stage: Stage = Stage.BUILDING
    built: int = 0  # the number of envs that it has made
    importing: str = ""  # the modules that it imports before it makes its first env
    shares_imports: bool = False  # True if it was forked by the session's zygote
    rebuild: bool = False  # True if it is about to be killed, so that the next process makes its envs in another way
    first: control.FirstBuilt | None = None  # its messages about its first env, and about all its envs
    made: control.Built | None = None
    # The time at which it is killed if it has not ended; infinity if that is not planned, or done.
    kill_at_s: float = math.inf
    killed_for: KilledFor | None = None  # a late env, too much memory, or an order; the first counts, or the order
    is_restored: bool = False  # True if a snapshot forked it, for its slot and no other
    is_closing: bool = False  # True once it was asked to close its envs, or killed
    unclosed: list[int] = field(default_factory=list)  # the rows that it was to close then, and has not closed
    closing: list[int] = field(default_factory=list)  # those of them that it closes now; none until it says so


@dataclass(eq=False)
class Slot:
    """A worker's place in its session."""

    index: int  # its number, from 0 on
    # Its rows; slot ``i`` of ``n`` has the rows with remainder ``i``, so that neighbouring slow envs are in different
    # workers.
    rows: list[int]
    process: Process | None = None  # the process that serves it or will serve it; None if there is none
    # The failure that its rows report after the end of its process, until a replacement serves.
    loss: WorkerLoss | None = None
    restart_at_s: float = math.inf  # the time at which its next process is started
    boot_failure: Failure | None = None  # the reason why its last process could not make the envs
    finish_at_s: float = math.inf  # the time until which steps wait for its next process
    serves_since_s: float = math.inf  # the time at which its process began to serve
    recycled: int = 0  # the number of its processes that were recycled
    needs_recycling: bool = False  # True if its process is to be recycled
    told_to_leave: bool = False  # True if its process was told so
    successor: Process | None = None  # the process that gets the slot once the present one has left; a restored one
    # The examples of the templates that its processes announced last, by number, oldest first.
    templates: dict[int, bytes] = field(default_factory=dict)

    @property
    def stage(self) -> Stage | None:
        return None if self.process is None else self.process.stage

    @property
    def serving(self) -> Process | None:
        process = self.process
        return process if process is not None and process.stage is Stage.SERVING else None


class SlotTable(list[Slot]):
    """All slots of a session, and its processes."""

    def __init__(self, num_envs: int, faults: Faults) -> None:
        self._num_envs, self._faults = num_envs, faults
        self._processes: dict[int, Process] = {}  # without ended processes
        self._started = 0
        self.spares: dict[int, Process] = {}  # the processes that serve no slot, by number

    def resize(self, count: int) -> None:
        """Divide the rows among this many slots, at least as many as before."""
        for index in range(count):
            rows = list(range(index, self._num_envs, count))
            if index < len(self):
                self[index].rows = rows
            else:
                self.append(Slot(index, rows))

    # --- processes ----------------------------------------------------------------------------------------------------

    def begin(self, slot: Slot, spare: bool = False) -> Process:
        """Add a process that makes the envs of this slot, which must not have one; or a spare with envs like these."""
        process = Process(self._started, slot.index, HangDetector(self._faults))
        self._processes[process.number] = process
        self._started += 1
        if spare:
            self.spares[process.number] = process
        else:
            slot.process, slot.restart_at_s = process, math.inf
        return process

    def end(self, process: Process) -> None:
        del self._processes[process.number]
        self.spares.pop(process.number, None)
        slot = self[process.slot_index]
        if slot.process is process:
            slot.process = None

    def assign(self, slot: Slot, spare: Process) -> Process | None:
        """Give the slot to this spare; return the slot's former process, which becomes a spare."""
        before = slot.process
        del self.spares[spare.number]
        slot.process, slot.restart_at_s, spare.slot_index = spare, math.inf, slot.index
        if before is not None:
            self.spares[before.number] = before
        return before

    def vacate(self, slot: Slot, process: Process) -> None:
        process.stage = Stage.LEAVING
        slot.process, self.spares[process.number] = None, process

    def process(self, number: int) -> Process | None:
        return self._processes.get(number)

    def of(self, process: Process) -> Slot | None:
        """The slot of a process; None for a spare and for a leaving process."""
        slot = self[process.slot_index]
        return slot if slot.process is process else None

    def of_row(self, row: int) -> Slot:
        return self[row % len(self)]

    def of_number(self, number: int) -> Slot | None:
        process = self._processes.get(number)
        return None if process is None else self.of(process)

    def worker(self, number: int) -> int:
        """The worker number of a process in the log: the index of its slot, or the process's number if it had none."""
        process = self._processes[number]
        return process.slot_index if process.stage is Stage.LEAVING or self.of(process) is not None else number

    @property
    def processes(self) -> list[Process]:
        """All processes: first those of the slots, in the slots' order, then the others."""
        return [*(slot.process for slot in self if slot.process is not None), *self.spares.values()]


@dataclass
class Deadlines:
    """Times on the monotonic clock; infinity if nothing is planned."""

    drain_by_s: float = math.inf  # time at which a session of a draining hub ends, even with a pending request
    end_by_s: float = math.inf  # time after which no env of a draining hub gets more time to close
    sample_at_s: float = math.inf  # time of the arena's next sample
    memory_at_s: float = math.inf  # time of the next measurement of the processes' memory
    spares_at_s: float = math.inf  # time after which spares are made again

    @property
    def draining(self) -> bool:
        return self.drain_by_s != math.inf

    def plan_sample(self, now_s: float) -> None:
        """Plan a sample of the arena soon, if envs run; a time in the past belongs to an earlier request."""
        if not now_s < self.sample_at_s <= now_s + SAMPLE_S:
            self.sample_at_s = now_s + SAMPLE_S

    def waits_for_spares(self, now_s: float) -> bool:
        """True if no spare is made now: the hub drains, or the last spare could not make its envs."""
        return self.draining or now_s < self.spares_at_s < math.inf

    def next_s(self, slots: SlotTable, samples: bool, age_s: float) -> float:
        """The next deadline of a live session; ``age_s`` is the time at which a process is due for recycling."""
        planned = [self.drain_by_s, self.memory_at_s, age_s]
        if samples:
            planned.append(self.sample_at_s)
        if not self.draining:  # a draining hub makes no spares
            planned.append(self.spares_at_s)
        of_slots = (at_s for slot in slots for at_s in (slot.restart_at_s, slot.finish_at_s))
        return min((*planned, *of_slots, *(process.kill_at_s for process in slots.processes)))
