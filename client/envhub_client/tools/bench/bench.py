"""Command ``envhub bench``: time the ways to step the same envs in turn, in one run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import envhub
from envhub_client.tools.bench.budget import MEANINGS, budget, budget_table
from envhub_client.tools.bench.contest import ECHO, ONE_WAY, Contest, Result
from envhub_client.tools.bench.entrant import ALONE, ASYNC, IPC, PROCESSES_MAX, TCP, WIRE, sized
from envhub_client.tools.bench.plot import draw, times
from envhub_client.tools.bench.rivals import FORKING, THREADED
from envhub_client.tools.bench.served_hub import ServedHub, served_hub
from envhub_client.tools.bench.workloads import offered
from envhub_client.tools.progress import counting_bar

EXPLANATION = (
    "steps/s are of envs, the median of the repeats, and spread is how far they go; p50 and p99 are of one step of the "
    "whole batch, over all repeats. procs are the processes the envs are in, where 0 is this one; cores are the CPUs "
    "that were busy; MB is what the way added to this machine's memory (PSS), with all of the hub it goes through. The "
    "private hub and the one over ipc are stepped on the shared lane where it does not say wire, the one over tcp on "
    f"the wire lane. {ALONE}: one env, stepped in this process on one core. {ECHO}: a request and a reply of the same "
    f"bytes by raw pyzmq over tcp, to and from a process that steps nothing; {ONE_WAY}: the replies alone, of which "
    f"none is asked for. Ways that take a process for each env are left out above {PROCESSES_MAX} envs."
)


def run(
    console: Console,
    envs: Sequence[str],
    sizes: list[int],
    seconds: float,
    repeats: int,
    as_json: bool = False,
    picture: Path | None = None,
) -> None:
    """Time everything, and print a table per env with a line about the machine, or ``as_json`` objects.

    The arguments are as those of ``envhub bench``, which describes and checks them; a ``picture`` is drawn besides.

    Raises:
        HubUnreachable: no hub can run here.
        Exception: what Gymnasium raises for an env it cannot make.
    """
    machine = machine_line(os.getloadavg())  # before the bench itself is the load
    aside = Console(stderr=True, highlight=False) if as_json else console
    with served_hub(*map(offered, envs)) as hub, counting_bar(aside, "measuring {task.description}") as progress:
        results: dict[str, list[dict[str, Result]]] = {}
        failures: list[str] = []
        for env, size in itertools.product(envs, sizes):
            found, failed = measure(env, size, hub, seconds, repeats, progress)
            results.setdefault(env, []).append(found)
            failures += [f"{rival} with {sized(size)} of {env}: {why}" for rival, why in failed.items()]
    if picture:
        draw(picture, results, f"{repeats} repeats of {seconds:g} s on {machine}")
    for env, by_size in results.items():
        if as_json:
            for record in records(env, by_size):
                console.print_json(json.dumps({**record, "machine": machine}), indent=None)
        else:
            console.print(table(f"{env}, {repeats} interleaved repeats of {seconds:g} s", by_size), "", sep="\n")
    for failure in failures:
        aside.print(failure, markup=False, soft_wrap=True)
    if not as_json:
        console.print(EXPLANATION, machine, sep="\n")


def run_budget(console: Console, envs: Sequence[str], sizes: list[int]) -> None:
    """Print where the time of one step goes, on the shared lane, by wire over ipc, and over tcp.

    Raises:
        HubUnreachable: no hub can run here.
        Exception: what Gymnasium raises for an env it cannot make.
    """
    with served_hub(*map(offered, envs)) as hub:
        ways: list[tuple[str, str, Literal["auto", "wire"]]] = [
            ("shared", hub.ipc, "auto"),
            ("wire, ipc", hub.ipc, "wire"),
            ("wire, tcp", hub.tcp, "wire"),
        ]
        for env, size in itertools.product(envs, sizes):
            found = {}
            for way, address, lane in ways:
                with contextlib.closing(envhub.make_vec(env, size, hub=address, lane=lane)) as envs_of_way:
                    found[way] = budget(envs_of_way)
            console.print(budget_table(env, size, found))
    for hop, meaning in MEANINGS.items():
        console.print(f"{hop}: {meaning}")
    console.print(machine_line(os.getloadavg()))


def records(env: str, results: Sequence[Mapping[str, Result]]) -> Iterator[dict[str, Any]]:
    """One record per number of envs and way, for programs."""
    for by_way in results:
        for way, result in by_way.items():
            found = asdict(result)
            summary = {"to_async": to_async(result, by_way), **found.pop("summary")}
            yield {"env": env, "num_envs": result.num_envs, "way": way, **found, **summary}


def measure(
    env: str, num_envs: int, hub: ServedHub, seconds: float, repeats: int, progress: Progress
) -> tuple[dict[str, Result], dict[str, str]]:
    """The results of every way to step ``num_envs`` envs, in turn, and by rival why it could not take part.

    Of one number of envs only, to bound the memory that it takes.
    """
    task = progress.add_task(f"{env}, {sized(num_envs)}", total=None)
    with Contest(env, num_envs) as contest:
        contest.add_alone()
        if num_envs <= PROCESSES_MAX:
            contest.add_async()
        contest.add_sync()
        for rival in FORKING:
            contest.add_rival(rival)
        contest.add_private_hub()
        contest.add_private_hub(WIRE, lane="wire")  # as if it were on another machine
        contest.add_hub(IPC, hub.ipc, hub.pid)
        contest.add_hub(TCP, hub.tcp, hub.pid)
        for rival in THREADED:
            contest.add_rival(rival)
        contest.add_pyzmq()
        progress.update(task, total=len(contest.ways) * repeats)
        results = contest.run(seconds, repeats, partial(progress.update, task, advance=1, refresh=True))
    progress.remove_task(task)
    return results, contest.failures


def to_async(result: Result, by_way: Mapping[str, Result]) -> float | None:
    """Number of times as fast as ``AsyncVectorEnv``, which is not there with too many envs."""
    return result.summary.rate / by_way[ASYNC].summary.rate if ASYNC in by_way else None


def table(title: str, results: Sequence[Mapping[str, Result]]) -> Table:
    """One row per number of envs and way; fits into 80 columns."""
    found = Table(title=title, box=box.SIMPLE, padding=0, show_edge=False)
    found.add_column("stepped by", no_wrap=True)
    for name in ("procs", "cores", "MB", "steps/s", "spread", "p50", "p99", "to Async"):
        found.add_column(name, justify="right", no_wrap=True)
    for by_way in results:
        found.add_row(f"[bold]{sized(next(iter(by_way.values())).num_envs)}")
        for way, result in by_way.items():
            found.add_row(f"  {way}", *cells(result, to_async(result, by_way)))
        found.add_section()
    return found


def cells(result: Result, ratio: float | None) -> list[str]:
    """A row of the table, from the number of processes on."""
    summary = result.summary
    used = [f"{result.cores:.1f}", f"{result.memory_mb:.0f}"]
    latency = [duration(summary.p50_us), duration(summary.p99_us)]
    if result.processes is None:  # where nothing is stepped there are no env-steps/s
        return ["", *used, "", "", *latency, ""]
    spread = f"{summary.slowest / summary.rate - 1:+.0%} {summary.fastest / summary.rate - 1:+.0%}"
    shown = "" if ratio is None else times(ratio)
    return [str(result.processes), *used, f"{summary.rate:,.0f}", spread, *latency, shown]


def duration(us: float) -> str:
    """Microseconds to three digits, in the unit that suits them: at most 7 characters."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= 0.9995 * size:
            return f"{us / size:#.3g} {unit}".replace(". ", " ")
    return f"{us:.0f} µs"


def machine_line(load: tuple[float, float, float]) -> str:
    """The machine, its load average over 1, 5 and 15 minutes, and the versions of what was timed."""
    cores = f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()} cores ({platform.machine()})"
    before = "load before " + " ".join(f"{value:.1f}" for value in load)
    packages = (f"{package} {version(package)}" for package in ("gymnasium", "pyzmq", "numpy"))
    return ", ".join([cores, before, f"Python {platform.python_version()}", f"envhub {envhub.__version__}", *packages])
