"""When an env is taken to hang: pure; time is the caller's.

Deadlines are of envs, not of workers. A worker stores which env it is at, and the hub looks now and then: for as long
as it sees the same env at the same turn, that env has not finished. So a worker of many slow envs is never stuck, and
an env pays for nobody's time but its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from envhub.protocol.messages import Faults

SLOW_S = 30.0  # from here on the operator is told, once


@dataclass(frozen=True)
class Late:
    """An env that has not finished.

    Attributes:
        kind: what it was to do: ``init``, ``reset``, ``step`` or ``call``.
        row: which env.
        waited_s: for how long.
        limit_s: its deadline.
    """

    kind: str
    row: int
    waited_s: float
    limit_s: float

    @property
    def over(self) -> bool:
        """Whether its worker is to be ended."""
        return self.waited_s >= self.limit_s


class HangDetector:
    """Looks at one worker."""

    def __init__(self, faults: Faults) -> None:
        self._limits_s = {kind: getattr(faults, f"{kind}_s") for kind in ("init", "reset", "step", "call")}
        self.rest()

    def rest(self) -> None:
        """Nothing is under way."""
        self._turn: tuple[str, int] | None = None
        self._since_s = 0.0
        self._told = False

    def look(self, now_s: float, kind: str, row: int, turn: int) -> Late | None:
        """See the worker busy at this turn; what is to be told, once when it is slow, and when its time is over."""
        if (kind, turn) != self._turn:
            self._turn, self._since_s, self._told = (kind, turn), now_s, False
            return None
        late = Late(kind, row, now_s - self._since_s, self._limits_s[kind])
        if late.over or (late.waited_s >= SLOW_S and not self._told):
            self._told = True
            return late
        return None
