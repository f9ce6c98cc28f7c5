"""The samples of the last hour, of a hub and of its sessions, from which the page draws its curves. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any

SAMPLE_S = 5.0  # from one sample to the next
KEPT_S = 3600.0
SERIES_MAX = 256  # sessions that have curves; those that were sampled longest ago lose theirs
HUB = ""  # the name of the hub's own series
FIELDS = ("sessions", "steps_per_s", "p50_ms", "p99_ms", "env_p99_ms", "cpu", "memory_bytes")
_WIDTH = 1 + len(FIELDS)  # a sample begins with its time


def values_of(row: Mapping[str, Any]) -> list[float]:
    """The values of a session's row, in the order of ``FIELDS``; NaN for those that are not known."""
    step, env = row.get("step_ms") or {}, row.get("env_ms") or {}
    each = (1.0, row.get("steps_per_s"), step.get("p50"), step.get("p99"), env.get("p99"))
    return [nan if value is None else float(value) for value in (*each, row.get("cpu"), row.get("memory_bytes"))]


def totals_of(rows: Sequence[Sequence[float]]) -> list[float]:
    """The values of a hub: sums, and of times those of its slowest session."""
    columns = [[value for value in column if not isnan(value)] for column in zip(*rows, strict=True)]
    columns = columns or [[] for _ in FIELDS]
    return [
        max(column, default=nan) if name.endswith("_ms") else sum(column)
        for name, column in zip(FIELDS, columns, strict=True)
    ]


class History:
    """The samples of each series, in as little memory as they have numbers."""

    def __init__(self) -> None:
        self._series: dict[str, array[float]] = {}

    def add(self, now_s: float, sessions: Sequence[Mapping[str, Any]]) -> None:
        """Take a sample of these rows of ``Client.sessions``."""
        values = {row["session"]: values_of(row) for row in sessions}
        for name, sample in [(HUB, totals_of([*values.values()])), *values.items()]:
            series = self._series.pop(name, array("d"))
            series.extend((now_s, *sample))
            self._series[name] = series  # at the end: the first ones were sampled longest ago
        for name, series in [*self._series.items()]:
            old = next((n for n in range(0, len(series), _WIDTH) if series[n] > now_s - KEPT_S), len(series))
            del series[:old]
            if not series or (len(self._series) > SERIES_MAX + 1 and name != HUB):
                del self._series[name]

    def curves(self, now_s: float, name: str = HUB) -> dict[str, list[list[float | None]]]:
        """By field, the points of a curve: minutes before ``now_s``, and the value, None where it was not known."""
        series = self._series.get(name, array("d"))
        minutes = [round((at_s - now_s) / 60, 3) for at_s in series[::_WIDTH]]
        return {
            field: [
                [at, None if isnan(value) else round(value, 3)]
                for at, value in zip(minutes, series[n::_WIDTH], strict=True)
            ]
            for n, field in enumerate(FIELDS, 1)
        }
