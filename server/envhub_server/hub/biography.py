"""The life of a session, of which the table of sessions tells: who has it, what it has done and how it ends.

Times of its steps, and the slow requests of a hub, are read off words of arenas. Clients and workers write these words.
Wrong ones make wrong numbers, and nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np

from envhub.errors import shortened
from envhub.protocol.messages import Failure
from envhub_server.ipc.control import Slow
from envhub_server.memory.session_memory import SessionMemory
from envhub_server.network.connections import Holder
from envhub_server.session.machine import SessionMachine
from envhub_server.session.slots import Slot

LOOK_S = 1.0  # between two looks at the steps of a session, and at least between two at the costs of a process
REASONS_MAX = 8  # of replaced workers, the last ones of a session
REPLAYS_MAX = 16  # names, the last ones of a session
CLOSED, KILLED, NOT_MADE = "closed", "killed", "not made"
_BY_ITSELF = ("client", "lease", "hub", "key removed")

SLOW_ROWS_MAX = 128
TEXT_CHARS_MAX = 200  # of each text that is kept or shown
VERB_CHARS_MAX = 64

Times = dict[str, float | None]  # p50 and p99 in milliseconds; None if nothing was timed
Row = dict[str, Any]


def percentiles(times_ns: np.ndarray) -> list[Times]:
    """Return for each row of times the ones of these ranks; those that are not above 0 do not count."""
    ordered = np.sort(times_ns, axis=1)
    counts = np.count_nonzero(ordered > 0, axis=1)[:, np.newaxis]
    ranks = np.ceil(counts * [0.5, 0.99]).astype(int)
    at = np.take_along_axis(ordered, ordered.shape[1] - np.maximum(counts, 1) + ranks - 1, axis=1) / 1e6
    return [
        {"p50": round(p50, 4), "p99": round(p99, 4)} if count else {"p50": None, "p99": None}
        for (count,), (p50, p99) in zip(counts.tolist(), at.tolist(), strict=True)
    ]


class Latencies(NamedTuple):
    """Times of the last steps of one session."""

    step_ms: Times  # as its driver sees them
    env_ms: Times  # the parts of all workers
    worker_ms: list[Times]  # the part of each worker
    envs_ms: list[Times]  # that of each env


UNTIMED: Times = {"p50": None, "p99": None}
NO_TIMES = Latencies(UNTIMED, UNTIMED, [], [])


def latencies(memory: SessionMemory, workers: int) -> Latencies:
    arena = memory.arena
    worker_ns = arena.worker_ns[:workers]  # the first row of a worker has its number
    (step_ms,), (env_ms,) = percentiles(arena.step_ns[np.newaxis]), percentiles(worker_ns.reshape(1, -1))
    return Latencies(step_ms, env_ms, percentiles(worker_ns), percentiles(arena.env_ns))


def in_one_line(text: str) -> str:
    """A client's text as it is kept and shown: short, and without characters that cannot be printed."""
    return shortened("".join(each if each.isprintable() else " " for each in text).strip(), TEXT_CHARS_MAX)


class Ending(NamedTuple):
    """The end of a session, for its user and the table."""

    by: str  # ``client``, ``lease``, ``hub``, ``key removed``, or who else ends it, such as ``admin NAME``
    why: str
    how: str  # what becomes of its envs: ``CLOSED``, ``KILLED`` or ``NOT_MADE``

    def failure(self, name: str) -> Failure:
        """The failure of requests to the session of this name, for its user."""
        by = "has ended" if self.by in _BY_ITSELF else f"was ended by {self.by}"
        return Failure("session_lost", "session", f"session {name} {by}: {self.why}")


class Costs(NamedTuple):
    """Costs of a process and those that it started, at a time."""

    taken_s: float
    cpu_s: float
    cpu: float | None  # CPUs that it used since the look before, or since it began
    memory_bytes: int


@dataclass
class Biography:
    """Facts of one session that its machine does not need."""

    made_s: float
    owner: dict[str, Any] = field(default_factory=dict)  # who has the session, as of ``Access.owner``
    label: str = ""
    taken_by: str = ""  # the administrator that took it over by its name; empty for none
    drained_by: str = "hub"  # who drains the hub, if it is drained
    ending: Ending | None = None  # the first reason why it ends
    ended_lane: str = "wire"
    times: Latencies = NO_TIMES  # by the last look
    reasons: deque[tuple[float, int, int | None, str]] = field(default_factory=lambda: deque(maxlen=REASONS_MAX))
    replays: deque[str] = field(default_factory=lambda: deque(maxlen=REPLAYS_MAX))
    costs: dict[int, Costs] = field(default_factory=dict)  # by the number of a process
    cpu_before_s: float = 0.0  # of processes that have ended, by the last looks at them
    looked_s: float = math.nan  # when its steps were counted last
    steps: int = 0
    steps_per_s: float | None = None
    moves: int = -1  # of its envs: resets, steps and calls
    moved_s: float = 0.0

    def end(self, ending: Ending) -> None:
        """Note who ends the session, and why; the first reason counts."""
        if self.ending is None:
            self.ending = ending
        elif (self.ending.how, ending.how) == (CLOSED, KILLED):
            self.ending = self.ending._replace(how=KILLED)

    def look(self, steps: int, moves: int, is_busy: bool, now_s: float) -> None:
        if now_s - self.looked_s >= LOOK_S:
            self.steps_per_s = (steps - self.steps) / (now_s - self.looked_s)
        if not now_s - self.looked_s < LOOK_S:
            self.looked_s, self.steps = now_s, steps
        if moves != self.moves or is_busy:
            self.moves, self.moved_s = moves, now_s


@dataclass(eq=False)
class Subject:
    """A session whose requests may be slow."""

    name: str
    owner: str
    state: SessionMachine
    memory: SessionMemory | None

    def slow_row(self, slot: Slot, rows: list[int], verb: str, took_ns: int) -> Row:
        env = self.state.make.name[:TEXT_CHARS_MAX] or "factories"
        whose = {"session": self.name, "env": env, "worker": slot.index, "envs": rows}
        return {**whose, "verb": shortened(verb, VERB_CHARS_MAX), "ms": round(max(0, took_ns) / 1e6, 1)}

    def slow_running(self, slot: Slot) -> Row | None:
        """The row of the request that a worker is at, if it is slow."""
        slow_ns = self.state.launcher.rules.slow_ms * 1_000_000
        if self.memory is None or not slow_ns or slot.serving is None:
            return None
        at, took_ns = self.memory.progress(slot.index), self.memory.at_work_ns(slot.index)
        return self.slow_row(slot, [at.row], at.verb, took_ns) if at and at.kind and took_ns >= slow_ns else None


class SlowRequests:
    """The last steps, resets and calls of a hub's sessions that took at least ``slow_ms``."""

    def __init__(self) -> None:
        self._ended: deque[tuple[int, str, Row]] = deque(maxlen=SLOW_ROWS_MAX)  # the time, the owner, and the row

    def on_slow(self, subject: Subject, process: int, slow: Slow) -> None:
        """Keep what this process has sent."""
        if (slot := subject.state.slots.of_number(process)) is not None:
            rows = [row for row in slot.rows if row in slow.rows]
            self._ended.append((monotonic_ns(), subject.owner, subject.slow_row(slot, rows, slow.verb, slow.took_ns)))

    def on_exited(self, subject: Subject, process: int) -> None:
        """Keep the request that a process was at when it ended, if that was slow."""
        slot = subject.state.slots.of_number(process)
        if slot is not None and (row := subject.slow_running(slot)) is not None:
            self._ended.append((monotonic_ns(), subject.owner, row))

    def rows(self, holder: Holder, subjects: Iterable[Subject]) -> list[Row]:
        """Return a row for each of them, the oldest first, then one for each request that is slow now."""
        now_ns, kept = monotonic_ns(), [(ended_ns, row) for ended_ns, owner, row in self._ended if holder.owns(owner)]
        rows = [{**row, "ago_s": round((now_ns - ended_ns) / 1e9, 1)} for ended_ns, row in kept]
        slots = [(each, slot) for each in subjects for slot in each.state.slots]
        rows += [{**row, "ago_s": None} for each, slot in slots if (row := each.slow_running(slot)) is not None]
        return rows[-SLOW_ROWS_MAX:]
