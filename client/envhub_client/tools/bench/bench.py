"""Command ``envhub bench``: time the ways to step an env in turn, and say which is fastest on this machine, and why."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

import envhub
from envhub_client.tools.bench import entrant as entrants
from envhub_client.tools.bench.budget import MEANINGS, budget, budget_table
from envhub_client.tools.bench.contest import Contest
from envhub_client.tools.bench.entrant import Entrant, Task, sized
from envhub_client.tools.bench.report import EXPLANATION, most_steps, table, verdict
from envhub_client.tools.bench.result import Result, SizeResults
from envhub_client.tools.bench.served_hub import ServedHub, served_hub
from envhub_client.tools.progress import counting_bar


def run(
    console: Console, entries: Sequence[str], sizes: list[int], seconds: float, repeats: int, as_json: bool = False
) -> None:
    """Time everything, and print for each env a table and what is fastest, or ``as_json`` objects.

    The arguments are as those of ``envhub bench``, which describes and checks them.

    Raises:
        RequestRefused: an entry is no env.
        HubUnreachable: no hub can run here.
        Exception: what Gymnasium raises for an env it cannot make.
    """
    machine = machine_line(os.getloadavg())  # before the bench itself is the load
    aside = Console(stderr=True, highlight=False) if as_json else console
    for entry in entries:
        entrants.factory(entry)  # refused before a hub is started
    with served_hub(*entries) as hub, counting_bar(aside, "measuring {task.description}") as progress:
        for entry in entries:
            results = [measure(Task(entry, size), hub, seconds, repeats, progress) for size in sizes]
            if as_json:
                for record in itertools.chain.from_iterable(map(records, results)):
                    console.print_json(json.dumps({"env": entry, **record, "machine": machine}), indent=None)
                continue
            console.print(table(f"{entry}, {repeats} interleaved repeats of {seconds:g} s", results), "", sep="\n")
            for line in (*map(verdict, results), *most_steps(results)):
                console.print(line, markup=False, soft_wrap=True)
            console.print()
    if not as_json:
        console.print(EXPLANATION, machine, sep="\n", markup=False)


def run_budget(console: Console, entries: Sequence[str], sizes: list[int]) -> None:
    """Print where the time of one step goes, on the shared lane, by wire over ipc, and over tcp.

    Raises:
        RequestRefused: an entry is no env.
        HubUnreachable: no hub can run here.
        Exception: what Gymnasium raises for an env it cannot make.
    """
    for entry in entries:
        entrants.factory(entry)
    with served_hub(*entries) as hub:
        ways: list[tuple[str, str, Literal["auto", "wire"]]] = [
            ("shared", hub.ipc, "auto"),
            ("wire, ipc", hub.ipc, "wire"),
            ("wire, tcp", hub.tcp, "wire"),
        ]
        for entry, size in itertools.product(entries, sizes):
            task, budgets = Task(entry, size), {}
            for way, address, lane in ways:
                with contextlib.closing(envhub.make_vec(task.name, size, hub=address, lane=lane)) as envs:
                    budgets[way] = budget(envs)
            console.print(budget_table(entry, size, budgets))
    for hop, meaning in MEANINGS.items():
        console.print(f"{hop}: {meaning}")
    console.print(machine_line(os.getloadavg()))


def measure(task: Task, hub: ServedHub, seconds: float, repeats: int, progress: Progress) -> SizeResults:
    """Time every way to step the envs of a task, in turn."""
    bar = progress.add_task(f"{task.entry}, {sized(task.num_envs)}", total=None)
    share = BusyShare(entrants.ALONE)

    @contextlib.contextmanager
    def turn(way: str) -> Iterator[None]:
        with share.measured(way):
            yield
        progress.update(bar, advance=1, refresh=True)

    with Contest() as contest:
        for way, entrant in ways_of(task, hub).items():
            contest.add(way, entrant)
        progress.update(bar, total=len(contest.entrants) * repeats)
        summaries = contest.run(seconds, repeats, turn)
    progress.remove_task(bar)
    results = {
        way: Result(entrant.processes or 0, entrant.sizing, summaries[way]) for way, entrant in contest.entrants.items()
    }
    return SizeResults(task.num_envs, results.pop(entrants.ALONE).summary, share.computes(), results)


def ways_of(task: Task, hub: ServedHub) -> dict[str, contextlib.AbstractContextManager[Entrant]]:
    """The ways to step, with those that fork before those that start threads."""
    wire = {"lane": "wire"}  # as if the hub were on another machine
    forking = {entrants.ASYNC: entrants.async_entrant(task)} if task.num_envs <= entrants.PROCESSES_MAX else {}
    return {
        entrants.ALONE: entrants.alone_entrant(task),
        **forking,
        entrants.SYNC: entrants.sync_entrant(task),
        entrants.PRIVATE: entrants.private_entrant(task),
        entrants.PRIVATE_WIRE: entrants.private_entrant(task, **wire),
        entrants.IPC: entrants.hub_entrant(task, hub.ipc),
        entrants.IPC_WIRE: entrants.hub_entrant(task, hub.ipc, **wire),
        entrants.TCP: entrants.hub_entrant(task, hub.tcp),
    }


class BusyShare:
    """Share of the time for which this process computes, or has to wait for a CPU, while it steps in one way."""

    def __init__(self, way: str) -> None:
        """Measure in this way only."""
        self._way = way
        self._busy_s = self._wall_s = 0.0

    @contextlib.contextmanager
    def measured(self, way: str) -> Iterator[None]:
        """Measure the block if it steps in this way."""
        busy_s, wall_s = _busy_s(), time.perf_counter()
        yield
        if way == self._way:
            self._busy_s += _busy_s() - busy_s
            self._wall_s += time.perf_counter() - wall_s

    def computes(self) -> bool:
        """True if the envs compute for most of their steps, rather than wait."""
        return self._busy_s > self._wall_s / 2


def _busy_s() -> float:
    """CPU time of this process, and the time for which this thread has waited for a CPU, where Linux counts that."""
    try:
        waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError):  # built without CONFIG_SCHED_INFO
        waited_ns = 0
    return time.process_time() + waited_ns / 1e9


def records(results: SizeResults) -> Iterator[dict[str, Any]]:
    """One record per way, for programs."""
    fastest = results.fastest()
    for way, result in results.by_way.items():
        ratio = results.ratio(way)
        yield {
            "num_envs": results.num_envs,
            "way": way,
            "processes": result.processes,
            "rate": result.summary.rate,
            "rates": result.summary.rates,
            "p50_us": result.summary.p50_us,
            "p99_us": result.summary.p99_us,
            "envs_us": results.envs_us(way),
            "baseline": results.baseline,
            **{f"ratio_{name}": value for name, value in vars(ratio).items()},
            "fastest": way == fastest,
            "sizing": result.sizing,
        }


def machine_line(load: tuple[float, float, float]) -> str:
    """The machine, its load average over 1, 5 and 15 minutes, and the versions of what was timed."""
    cores = f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()} cores ({platform.machine()})"
    before = "load before " + " ".join(f"{value:.1f}" for value in load)
    packages = (f"{package} {version(package)}" for package in ("gymnasium", "pyzmq", "numpy"))
    return ", ".join([cores, before, f"Python {platform.python_version()}", f"envhub {envhub.__version__}", *packages])
