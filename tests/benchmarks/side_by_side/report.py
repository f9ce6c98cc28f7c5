"""A table of the measurements, and records for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from side_by_side.contest import ECHO, ONE_WAY, Measurement
from side_by_side.entrant import ALONE, ASYNC, PROCESSES_MAX, sized

EXPLANATION = (
    "steps/s are of envs, the median of the repeats, and spread is how far they go; p50 and p99 are of one step of the "
    "whole batch, over all repeats. procs are the processes the envs are in, where 0 is this one; cores are the CPUs "
    "that were busy; MB is what the way added to this machine's memory (PSS), with all of the hub it goes through. The "
    "private hub and the one over ipc are stepped on the shared lane where it does not say wire, the one over tcp on "
    f"the wire lane. {ALONE}: one env, stepped in this process on one core. {ECHO}: a request and a reply of the same "
    f"bytes by raw pyzmq over tcp, to and from a process that steps nothing; {ONE_WAY}: the replies alone, of which "
    f"none is asked for. Ways that take a process for each env are left out above {PROCESSES_MAX} envs."
)


def records(env: str, results: Sequence[Mapping[str, Measurement]]) -> Iterator[dict[str, Any]]:
    """One record per number of envs and way."""
    for by_way in results:
        for way, measured in by_way.items():
            record = asdict(measured)
            summary = {"to_async": to_async(measured, by_way), "rate": measured.summary.rate, **record.pop("summary")}
            yield {"env": env, "way": way, **record, **summary}


def to_async(measured: Measurement, by_way: Mapping[str, Measurement]) -> float | None:
    """Number of times as fast as ``AsyncVectorEnv``, which is not there with too many envs."""
    return measured.summary.ratio_to(by_way[ASYNC].summary).median if ASYNC in by_way else None


def table(title: str, results: Sequence[Mapping[str, Measurement]]) -> Table:
    """One row per number of envs and way; fits into 80 columns."""
    rows = Table(title=title, box=box.SIMPLE, padding=0, show_edge=False)
    rows.add_column("stepped by", no_wrap=True)
    for name in ("procs", "cores", "MB", "steps/s", "spread", "p50", "p99", "to Async"):
        rows.add_column(name, justify="right", no_wrap=True)
    for by_way in results:
        rows.add_row(f"[bold]{sized(next(iter(by_way.values())).num_envs)}")
        for way, measured in by_way.items():
            rows.add_row(f"  {way}", *cells(measured, to_async(measured, by_way)))
        rows.add_section()
    return rows


def cells(measured: Measurement, ratio: float | None) -> list[str]:
    """A row of the table, from the number of processes on."""
    summary = measured.summary
    used = [f"{measured.cores:.1f}", f"{measured.memory_mb:.0f}"]
    latency = [duration(summary.p50_us), duration(summary.p99_us)]
    if measured.processes is None:  # where nothing is stepped there are no env-steps/s
        return ["", *used, "", "", *latency, ""]
    spread = f"{min(summary.rates) / summary.rate - 1:+.0%} {max(summary.rates) / summary.rate - 1:+.0%}"
    shown = "" if ratio is None else times(ratio)
    return [str(measured.processes), *used, f"{summary.rate:,.0f}", spread, *latency, shown]


def duration(us: float) -> str:
    """Microseconds to three digits, in the unit that suits them: at most 7 characters."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= 0.9995 * size:
            return f"{us / size:#.3g} {unit}".replace(". ", " ")
    return f"{us:.0f} µs"


def times(ratio: float) -> str:
    """Number of times, at most 6 characters below 10,000."""
    return f"{ratio:,.{3 if ratio < 0.1 else 2 if ratio < 100 else 0}f}x"
