"""What ``envhub bench`` does: time the ways to step the same envs beside each other, in one run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import envhub
from envhub_client.budget import MEANINGS, budget, budget_table
from envhub_client.contest import ASYNC, ECHO, IPC, TCP, Contest, Result
from envhub_client.served_hub import ServedHub, served_hub
from envhub_client.workloads import offered

WAYS = 7
EXPLANATION = (
    "env-steps/s is the median of the repeats, spread how far they go; µs are of one step of the whole batch, over "
    "all repeats. procs are the processes the envs are in, where 0 is this one; cores are the CPUs that were busy. The "
    "private hub and the one over ipc are stepped on the shared lane where it does not say wire, the one over tcp on "
    f"the wire lane. {ECHO}: a request and a reply of the same bytes by raw pyzmq over tcp, to and from a process that "
    "steps nothing."
)


def run(
    console: Console, envs: Sequence[str], sizes: list[int], seconds: float, repeats: int, as_json: bool = False
) -> None:
    """Time everything, and print a table per env with a line about the machine.

    Args:
        console: where to print.
        envs: Gymnasium ids, or names in ``envhub_client.workloads``.
        sizes: numbers of envs.
        seconds: how long each measurement lasts.
        repeats: how often every way is measured, in turn.
        as_json: print one JSON object per way and number of envs instead.

    Raises:
        ValueError: a number that is too small.
        HubUnreachable: no hub can run here.
        Exception: what Gymnasium raises for an env it cannot make.
    """
    if not sizes or min(sizes) < 1 or repeats < 1 or seconds <= 0:
        raise ValueError("numbers of envs and repeats must be at least 1, and seconds more than 0")
    machine = machine_line(os.getloadavg())  # before the bench itself is the load
    with (
        served_hub(*map(offered, envs)) as hub,
        _progress_bar(Console(stderr=True) if as_json else console) as progress,
    ):
        task = progress.add_task("", total=len(envs) * len(sizes) * repeats * WAYS)
        advance = partial(progress.update, task, advance=1, refresh=True)
        results = {env: [measure(env, size, hub, seconds, repeats, advance) for size in sizes] for env in envs}
    if as_json:
        for env, by_size in results.items():
            for record in records(env, by_size):
                console.print_json(json.dumps({**record, "machine": machine}), indent=None)
        return
    for env, by_size in results.items():
        console.print(table(f"{env}, {repeats} interleaved repeats of {seconds:g} s", by_size))
    console.print(EXPLANATION, highlight=False)
    console.print(machine, highlight=False)


def run_budget(console: Console, envs: Sequence[str], sizes: list[int]) -> None:
    """Print where the time of one step goes, on the shared lane, by wire over ipc, and over tcp.

    Raises:
        ValueError: a number of envs that is too small.
        HubUnreachable: no hub can run here.
        Exception: what Gymnasium raises for an env it cannot make.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError("numbers of envs must be at least 1")
    with served_hub(*map(offered, envs)) as hub:
        ways = [("shared", hub.ipc, "auto"), ("wire, ipc", hub.ipc, "wire"), ("wire, tcp", hub.tcp, "wire")]
        for env, size in itertools.product(envs, sizes):
            found = {}
            for way, address, lane in ways:
                with contextlib.closing(envhub.make_vec(env, size, hub=address, lane=lane)) as envs_of_way:
                    found[way] = budget(envs_of_way)
            console.print(budget_table(env, size, found))
    for hop, meaning in MEANINGS.items():
        console.print(f"{hop}: {meaning}", highlight=False)
    console.print(machine_line(os.getloadavg()), highlight=False)


def records(env: str, results: Sequence[Mapping[str, Result]]) -> Iterator[dict[str, Any]]:
    """One record per number of envs and way, for programs."""
    for by_way in results:
        for way, result in by_way.items():
            yield {
                "env": env,
                "num_envs": result.num_envs,
                "way": way,
                "processes": result.processes,
                "cores": result.cores,
                "to_async": result.summary.rate / by_way[ASYNC].summary.rate,
                **asdict(result.summary),
            }


def measure(
    env: str, num_envs: int, hub: ServedHub, seconds: float, repeats: int, after_each: Callable[[], object]
) -> dict[str, Result]:
    """Time every way to step ``num_envs`` envs, in turn; of one number of envs only, to bound the memory it takes."""
    with Contest(env, num_envs) as contest:
        contest.add_async()
        contest.add_sync()
        contest.add_private_hub()
        contest.add_wire()
        contest.add_hub(IPC, hub.ipc)
        contest.add_hub(TCP, hub.tcp)
        contest.add_echo()
        return contest.run(seconds, repeats, after_each)


def table(title: str, results: Sequence[Mapping[str, Result]]) -> Table:
    """One row per number of envs and way; fits into 80 columns."""
    found = Table(title=title, box=box.SIMPLE, padding=0)
    found.add_column("stepped by", no_wrap=True)
    for name in ("procs", "cores", "env-steps/s", "spread", "µs p50", "µs p99", "to Async"):
        found.add_column(name, justify="right", no_wrap=True)
    for by_way in results:
        num_envs = by_way[ASYNC].num_envs
        found.add_row(f"[bold]{num_envs} {'env' if num_envs == 1 else 'envs'}")
        for way, result in by_way.items():
            found.add_row(f"  {way}", *cells(result, by_way[ASYNC].summary.rate))
        found.add_section()
    return found


def cells(result: Result, rate_of_async: float) -> list[str]:
    """A row of the table, from the number of processes on."""
    summary = result.summary
    latency = [f"{summary.p50_us:,.0f}", f"{summary.p99_us:,.0f}"]
    if result.processes is None:  # where nothing is stepped there are no env-steps/s
        return ["", f"{result.cores:.1f}", "", "", *latency, ""]
    spread = f"{summary.slowest / summary.rate - 1:+.0%} {summary.fastest / summary.rate - 1:+.0%}"
    cores = f"{result.cores:.1f}"
    return [
        str(result.processes),
        cores,
        f"{summary.rate:,.0f}",
        spread,
        *latency,
        f"{summary.rate / rate_of_async:.2f}x",
    ]


def machine_line(load: tuple[float, float, float]) -> str:
    """The machine, its load average over 1, 5 and 15 minutes, and the versions of what was timed."""
    parts = [
        f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()} cores ({platform.machine()})",
        "load before " + " ".join(f"{value:.1f}" for value in load),
        f"Python {platform.python_version()}",
        f"envhub {envhub.__version__}",
        *(f"{package} {version(package)}" for package in ("gymnasium", "pyzmq", "numpy")),
    ]
    return ", ".join(parts)


def _progress_bar(console: Console) -> Progress:
    # No thread to refresh it: AsyncVectorEnv forks, and a fork of a program with threads may hang.
    return Progress(
        TextColumn("measuring"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        console=console,
        transient=True,
        auto_refresh=False,
    )
