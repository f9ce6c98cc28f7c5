"""Detection of envs that hang. Pure; time is the caller's.

Deadlines are of envs, not of workers. A worker stores which env it is at, and the hub samples that: for as long as it
finds the same env at the same call, that env has not returned. So a worker of many slow envs never hangs, and an env
pays for no time but its own. No sample counts for more than twice the planned interval: after a pause of the whole
machine the hub may be the first to go on.
"""

from __future__ import annotations

from dataclasses import dataclass

from envhub.protocol.messages import Faults

SLOW_S = 30.0  # from here on the operator is told, once
INTERVALS_MAX = 2.0  # for how many planned intervals one sample counts at most


@dataclass(frozen=True)
class Progress:
    """Progress of a serving worker, by the arena's words.

    Attributes:
        turn: its progress word, which changes before every call into an env.
        row: the env that the word names, or the first one of the worker's where it names none of them.
        kind: ``init``, ``reset`` or ``step``, of a row that is not done; empty where all rows are.
    """

    turn: int
    row: int
    kind: str


@dataclass(frozen=True)
class Late:
    """An env that has not returned.

    Attributes:
        kind: what it was to do: ``init``, ``reset``, ``step`` or ``call``.
        row: which env.
        waited_s: for how long, without what late samples do not count for.
        limit_s: its deadline.
    """

    kind: str
    row: int
    waited_s: float
    limit_s: float

    @property
    def over(self) -> bool:
        """True if its worker is to be ended."""
        return self.waited_s >= self.limit_s


class HangDetector:
    """Judges the samples of one worker."""

    def __init__(self, faults: Faults) -> None:
        self._limits_s = {kind: getattr(faults, f"{kind}_s") for kind in ("init", "reset", "step", "call")}
        self.rest()

    def rest(self) -> None:
        """No env is called."""
        self._turn: tuple[str, int] | None = None
        self._sampled_s = self._waited_s = 0.0
        self._reported = False

    def sample(self, now_s: float, planned_s: float, kind: str, row: int, turn: int) -> Late | None:
        """Note where the worker is; returns what is to be reported, once when it is slow, and when its time is over.

        The sample was planned for ``planned_s`` after the last one.
        """
        passed_s, self._sampled_s = now_s - self._sampled_s, now_s
        if (kind, turn) != self._turn:
            self._turn, self._waited_s, self._reported = (kind, turn), 0.0, False
            return None
        self._waited_s += min(passed_s, INTERVALS_MAX * planned_s)
        late = Late(kind, row, self._waited_s, self._limits_s[kind])
        if late.over or (late.waited_s >= SLOW_S and not self._reported):
            self._reported = True
            return late
        return None
