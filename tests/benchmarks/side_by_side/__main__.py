"""Times every way to step the same envs: EnvHub's, Gymnasium's, those of the packages that are installed, and pyzmq.

The packages are SB3, tianshou, PufferLib, EnvPool, dm_env_rpc and OpenEnv. The table in README.md is of this run:

cd tests/benchmarks
python -m side_by_side CartPole-v1 images ALE/Pong-v5 HalfCheetah-v5 busy --seconds 0.3 --repeats 5
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from pathlib import Path

from envhub_client.private_hub.process import private_hub
from envhub_client.tools.bench import machine_line
from envhub_client.tools.console import counting_bar
from envhub_client.tools.served_hub import ServedHub, served_hub
from rich.console import Console
from rich.progress import Progress

from side_by_side import entrant as entrants
from side_by_side import plot
from side_by_side.contest import MeasuredContest, Measurement
from side_by_side.entrant import PROCESSES_MAX, Task, sized
from side_by_side.report import EXPLANATION, records, table
from side_by_side.rivals import FORKING, THREADED
from side_by_side.workloads import OWN, entry


def main(arguments: list[str] | None = None, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    asked = parser().parse_args(arguments)
    if asked.plot:
        plot.check(asked.plot)
    machine = machine_line()  # before this itself is the load
    aside = Console(stderr=True, highlight=False) if asked.json else console
    results: dict[str, list[dict[str, Measurement]]] = {env: [] for env in asked.envs}
    failures: list[str] = []
    with served_hub(*map(entry, asked.envs)) as hub, counting_bar(aside, "measuring {task.description}") as progress:
        for env, size in itertools.product(asked.envs, map(int, asked.n.split(","))):
            measured, failed = measure(Task(entry(env), size), hub, asked.seconds, asked.repeats, progress)
            results[env].append(measured)
            failures += [f"{rival} with {sized(size)} of {env}: {why}" for rival, why in failed.items()]
    if asked.plot:
        plot.draw(asked.plot, results, f"{asked.repeats} repeats of {asked.seconds:g} s on {machine}")
    for env, by_size in results.items():
        if asked.json:
            for record in records(env, by_size):
                console.print_json(json.dumps({**record, "machine": machine}), indent=None)
        else:
            title = f"{env}, {asked.repeats} interleaved repeats of {asked.seconds:g} s"
            console.print(table(title, by_size), "", sep="\n")
    for failure in failures:
        aside.print(failure, markup=False, soft_wrap=True)
    if not asked.json:
        console.print(EXPLANATION, machine, sep="\n")


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m side_by_side", description=__doc__)
    options.add_argument("envs", nargs="+", help=f"Gymnasium ids, or {', '.join(OWN)} (side_by_side/workloads.py)")
    options.add_argument("-n", default="1,16,64", help="numbers of envs, separated by commas (1,16,64)")
    options.add_argument("--seconds", type=float, default=1.0, help="seconds that each measurement lasts (1)")
    options.add_argument("--repeats", type=int, default=3, help="how often every way is measured (3)")
    options.add_argument("--json", action="store_true", help="print one JSON object per way and number of envs")
    options.add_argument("--plot", type=Path, help="a PNG or SVG file to draw the results into")
    return options


def measure(
    task: Task, hub: ServedHub, seconds: float, repeats: int, progress: Progress
) -> tuple[dict[str, Measurement], dict[str, str]]:
    """The results of every way to step the envs, in turn, and by rival why it could not take part."""
    bar = progress.add_task(f"{task.name}, {sized(task.num_envs)}", total=None)
    with MeasuredContest(task) as contest:
        contest.add(entrants.ALONE, entrants.alone_entrant(task))
        if task.num_envs <= PROCESSES_MAX:
            contest.add(entrants.ASYNC, entrants.async_entrant(task))
        contest.add(entrants.SYNC, entrants.sync_entrant(task))
        for rival in FORKING:
            contest.add_rival(rival)
        contest.add(entrants.PRIVATE, entrants.private_entrant(task), lambda: private_hub().pid)
        contest.add(entrants.PRIVATE_WIRE, entrants.private_entrant(task, lane="wire"), lambda: private_hub().pid)
        contest.add(entrants.IPC, entrants.hub_entrant(task, hub.ipc), lambda: hub.pid)
        contest.add(entrants.TCP, entrants.hub_entrant(task, hub.tcp), lambda: hub.pid)
        for rival in THREADED:
            contest.add_rival(rival)
        contest.add_pyzmq()
        progress.update(bar, total=len(contest.entrants) * repeats)
        measurements = contest.measure(seconds, repeats, partial(progress.update, bar, advance=1, refresh=True))
    progress.remove_task(bar)
    return measurements, contest.failures


if __name__ == "__main__":
    main()
