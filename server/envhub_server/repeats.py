"""A limit for repeated lines of a log or an audit file, so that a peer cannot make them grow without bound. Pure.

Lines with the same event and the same names, such as a client's and its origin's, form a group. In a period that begins
with a group's first line, the first line of each kind is written, up to a number of kinds. The other lines are counted,
and the count is written in one line at the end of the period.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envhub import errors

REPEAT_S = 10.0  # the period
LINES_MAX = 100  # of a group, in a period
ORIGINS_MAX = 64  # of an event, that are counted separately
OTHERS = "others"  # the name of all further origins
FIELD_CHARS_MAX = 2000  # of a text in a line
NETWORK_BYTES = 8  # of an IPv6 address, of which each machine has as many as it likes

Names = Mapping[str, str | int]


@dataclass
class _Period:
    until_s: float
    kinds: set[Hashable] = field(default_factory=set)
    lines: int = 0
    left_out: int = 0


_Group = tuple[str, tuple[tuple[str, str | int], ...], str]  # the event, the names and the origin of lines


class Repeats:
    """Selects the lines that are written, and counts the others."""

    def __init__(self) -> None:
        self._periods: dict[_Group, _Period] = {}  # the oldest first
        self._origins: dict[str, Counter[str]] = {}  # of each event, in these periods
        self._left_out: Counter[_Group] = Counter()  # in periods that have ended

    @property
    def pending(self) -> bool:
        """True if lines were left out that ``take_left_out`` has not returned."""
        return bool(self._left_out) or any(period.left_out for period in self._periods.values())

    def admits(
        self, event: str, names: Names, origin: str, kind: Hashable, now_s: float, lines_max: int = LINES_MAX
    ) -> bool:
        """True if a line is written.

        Args:
            event: of the line.
            names: of a bounded number of values, which tell lines apart, and are told of those left out.
            origin: likewise, of any values: of too many, the rest counts together.
            kind: of which one line is written in a period; None for one that no other line has.
            now_s: the time.
            lines_max: that belong together.
        """
        self._end_periods(now_s)
        period = self._period(event, names, origin, now_s)
        if period.lines >= lines_max or kind in period.kinds:
            period.left_out += 1
            return False
        period.lines += 1
        if kind is not None:
            period.kinds.add(kind)
        return True

    def _period(self, event: str, names: Names, origin: str, now_s: float) -> _Period:
        origins = self._origins.setdefault(event, Counter())
        if origin not in origins and len(origins) >= ORIGINS_MAX:
            origin = OTHERS
        group = event, tuple(names.items()), origin
        if group not in self._periods:
            origins[origin] += 1
            self._periods[group] = _Period(now_s + REPEAT_S)
        return self._periods[group]

    def _end_periods(self, now_s: float) -> None:
        while self._periods:
            group, period = next(iter(self._periods.items()))
            if period.until_s > now_s:
                return
            del self._periods[group]
            event, _, origin = group
            self._origins[event] -= Counter([origin])
            self._left_out += Counter({group: period.left_out})

    def take_left_out(self, now_s: float) -> list[dict[str, str | int]]:
        """Take the names and numbers of the lines that were left out in ended periods."""
        self._end_periods(now_s)
        counts, self._left_out = self._left_out, Counter()
        return [
            {"of": event, **dict(names), **({"origin": origin} if origin else {}), "lines": lines}
            for (event, names, origin), lines in counts.items()
        ]


def shortened(value: Any) -> Any:
    """The value of a line's field, if it is a text at most so long."""
    return errors.shortened(value, FIELD_CHARS_MAX) if isinstance(value, str) else value


def network_of(origin: str) -> str:
    """The part of its origin that a peer cannot vary: user on this machine, IPv4 address, or network of an IPv6 one."""
    if origin.startswith("localhost:"):  # by ipc; its process's number follows that of its user
        return ":".join(origin.split(":")[:2])
    # As an address of both families writes an IPv4 client; and the interface by which a link-local client comes.
    origin = origin.removeprefix("::ffff:").partition("%")[0]
    try:
        return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, origin)[:NETWORK_BYTES] + bytes(8))
    except OSError:
        return origin
