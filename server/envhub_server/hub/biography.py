"""The life of a session, of which the table of sessions tells: who has it, what it has done and how it ends."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from envhub.errors import shortened
from envhub.protocol.messages import Failure
from envhub_server.hub.latencies import TEXT_CHARS_MAX, Latencies, Times

LOOK_S = 1.0  # between two looks at the steps of a session, and at least between two at the costs of a process
REASONS_MAX = 8  # of replaced workers, the last ones of a session
REPLAYS_MAX = 16  # names, the last ones of a session
CLOSED, KILLED, NOT_MADE = "closed", "killed", "not made"
UNTIMED: Times = {"p50": None, "p99": None}
NO_TIMES = Latencies(UNTIMED, UNTIMED, [], [])
_BY_ITSELF = ("client", "lease", "hub", "key removed")


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
