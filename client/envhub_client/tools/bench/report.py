"""The report of ``envhub bench``: a table of the ways to step, and sentences about the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from envhub_client.tools.bench.entrant import ASYNC, PROCESSES_MAX, SYNC, sized
from envhub_client.tools.bench.result import Result, SizeResults

EXPLANATION = (
    "procs: the processes that the envs are in, 0 is this one. steps/s: of envs, the median of the repeats. batch: the "
    "median time of one step of all envs; envs: the part of it for which the envs run, by the time of one env alone; "
    "own: the rest, which the way itself takes. x: number of times as fast as AsyncVectorEnv in the same repeats, with "
    "the lowest and the highest. The private hub and the one over ipc are stepped on the shared lane where it does not "
    "say wire, the one over tcp on the wire lane, as from another machine. AsyncVectorEnv is left out above "
    f"{PROCESSES_MAX} envs; SyncVectorEnv is then what the others are compared to."
)


def table(title: str, results: Sequence[SizeResults]) -> Table:
    """One row per number of envs and way; fits into 80 columns."""
    rows = Table(title=title, box=box.SIMPLE, padding=0, show_edge=False)
    rows.add_column("stepped by", no_wrap=True)
    for name in ("procs", "steps/s", "batch", "envs", "own", "x", "spread"):
        rows.add_column(name, justify="right", no_wrap=True)
    for size in results:
        rows.add_row(f"[bold]{sized(size.num_envs)}")
        for way, result in size.by_way.items():
            rows.add_row(f"  {way}", *cells(size, way, result))
        rows.add_section()
    return rows


def cells(size: SizeResults, way: str, result: Result) -> list[str]:
    """A row of the table, from the number of processes on."""
    ratio = size.ratio(way)
    batch_us, envs_us = result.summary.p50_us, size.envs_us(way)
    durations = [duration(batch_us), duration(envs_us), duration(max(0.0, batch_us - envs_us))]
    spread = f"{times(ratio.low)}-{times(ratio.high)}"
    return [str(result.processes), f"{result.summary.rate:,.0f}", *durations, f"{times(ratio.median)}x", spread]


def verdict(size: SizeResults) -> str:
    """The fastest way with this number of envs, and why it is fastest."""
    way = size.fastest()
    ratio, result = size.ratio(way), size.by_way[way]
    spread = f"{times(ratio.low)} to {times(ratio.high)}"
    text = f"{sized(size.num_envs)}: {way} is fastest, {times(ratio.median)} times {size.baseline} ({spread})"
    if way == size.baseline:
        text = f"{sized(size.num_envs)}: {way} is fastest"
    if others := size.as_fast(way):
        text += f", but {' and '.join(others)} came before it in some repeat"
    text += f". {placed(size, result)} {shares(size, way)}"
    for other in (SYNC, ASYNC):
        if other in size.by_way and other != way:
            text += f" {shares(size, other)}"
    return text + (f" The number of workers: {result.sizing}." if result.sizing else "")


def placed(size: SizeResults, result: Result) -> str:
    """A sentence about the processes and their envs."""
    if not result.processes:
        return "It steps one env after the other, and sends no message."
    if size.num_envs <= result.processes:
        return "It steps each env in a process of its own."
    return f"{result.processes} workers step up to {-(-size.num_envs // result.processes)} envs each."


def shares(size: SizeResults, way: str) -> str:
    """A sentence about what a batch takes."""
    batch_us, envs_us = size.by_way[way].summary.p50_us, size.envs_us(way)
    own = duration(max(0.0, batch_us - envs_us))
    return f"{way} takes {duration(batch_us)} for a batch, {duration(envs_us)} for the envs and {own} of its own."


def most_steps(results: Sequence[SizeResults]) -> Iterator[str]:
    """A sentence about the number of envs with the most steps in all, where there are several numbers."""
    if len(results) > 1:
        size = max(results, key=lambda each: each.by_way[each.fastest()].summary.rate)
        way = size.fastest()
        yield f"Most steps: {sized(size.num_envs)} by {way}, {size.by_way[way].summary.rate:,.0f} steps/s."


def times(ratio: float) -> str:
    """A number of times, at most 5 characters below 10,000."""
    return f"{ratio:,.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def duration(us: float) -> str:
    """Microseconds to three digits, in the unit that suits them: at most 7 characters."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= 0.9995 * size:
            return f"{us / size:#.3g} {unit}".replace(". ", " ")
    return f"{us:.0f} µs"
