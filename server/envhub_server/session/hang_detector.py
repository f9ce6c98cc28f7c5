"""Detection of hanging envs. Pure; the caller passes the time in.

Each env has its own deadline. A worker stores which env it runs, and the hub samples that word: while the hub sees the
same env in the same call, that env has not returned. So a worker of many slow envs does not hang, and the time of one
env does not count for another. A sample counts for at most twice the planned interval, because the hub may be the first
process to continue after a pause of the whole machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from envhub.protocol.messages import Faults

SLOW_S = 30.0  # a longer call is reported to the operator, once
INTERVALS_MAX = 2.0  # a sample counts for at most this many planned intervals


@dataclass(frozen=True)
class Progress:
    """Progress of a serving worker, read from the arena's words.

    Attributes:
        turn: its progress word, which changes before every call into an env.
        row: the env that the word names, or the worker's first env if it names none of them.
        kind: ``init``, ``reset`` or ``step`` of a pending row; empty if all rows are done.
    """

    turn: int
    row: int
    kind: str


@dataclass(frozen=True)
class Late:
    """An env that has not returned.

    Attributes:
        kind: the operation: ``init``, ``reset``, ``step`` or ``call``.
        row: the env's row.
        waited_s: the duration so far, without the time that late samples leave out.
        limit_s: its deadline.
    """

    kind: str
    row: int
    waited_s: float
    limit_s: float

    @property
    def expired(self) -> bool:
        """True if the deadline has passed, so that the worker must be ended."""
        return self.waited_s >= self.limit_s


class HangDetector:
    """Judges the samples of one worker."""

    def __init__(self, faults: Faults) -> None:
        self._limits_s = {kind: getattr(faults, f"{kind}_s") for kind in ("init", "reset", "step", "call")}
        self.rest()

    def rest(self) -> None:
        """Note that no env is called."""
        self._turn: tuple[str, int] | None = None
        self._sampled_s = self._waited_s = 0.0
        self._reported = False

    def sample(self, now_s: float, planned_s: float, kind: str, row: int, turn: int) -> Late | None:
        """Note the worker's progress; return a late env once when it is slow, and again when its deadline has passed.

        The sample was planned for ``planned_s`` after the last one.
        """
        passed_s, self._sampled_s = now_s - self._sampled_s, now_s
        if (kind, turn) != self._turn:
            self._turn, self._waited_s, self._reported = (kind, turn), 0.0, False
            return None
        self._waited_s += min(passed_s, INTERVALS_MAX * planned_s)
        late = Late(kind, row, self._waited_s, self._limits_s[kind])
        if late.expired or (late.waited_s >= SLOW_S and not self._reported):
            self._reported = True
            return late
        return None
