"""Command ``envhub demo``: learn CartPole-v1 through a hub, as a remote trainer would, then compare ways to step.

The learner is ``client/examples/cem_cartpole.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from envhub_client.tools import cem_cartpole
from envhub_client.tools.bench.contest import Contest
from envhub_client.tools.bench.entrant import ASYNC, IPC, TCP, Entrant, Task, async_entrant, hub_entrant
from envhub_client.tools.bench.served_hub import ServedHub, served_hub
from envhub_client.tools.bench.timing import Summary

ENV = "CartPole-v1"
NUM_ENVS = cem_cartpole.NUM_ENVS
SEED = 1
SECONDS, REPEATS = 0.5, 3


def run(console: Console) -> None:
    """Serve, learn, compare; the hub is gone afterwards, however this ends.

    Raises:
        HubUnreachable: the hub did not start.
        SystemExit: with status 1, where nothing was learned.
    """
    with served_hub(ENV) as hub:
        console.print(f"a hub serves {ENV} at {hub.tcp} and {hub.ipc}", soft_wrap=True)
        console.print(f"learning with {NUM_ENVS} envs over tcp:")
        if cem_cartpole.learn(hub.tcp, SEED, console) <= cem_cartpole.SOLVED:
            sys.exit(1)
        console.print("stepping over tcp, over ipc, and by AsyncVectorEnv, in turn:")
        results = compare(hub)
    console.print(table(results))


def compare(hub: ServedHub) -> dict[str, tuple[Entrant, Summary]]:
    """Time the same stepping over tcp, over ipc, and by ``AsyncVectorEnv``, in turn."""
    task = Task(ENV, NUM_ENVS)
    with Contest() as contest:
        contest.add(ASYNC, async_entrant(task))  # first, since it forks
        contest.add(TCP, hub_entrant(task, hub.tcp))
        contest.add(IPC, hub_entrant(task, hub.ipc))
        summaries = contest.run(SECONDS, REPEATS)
    return {way: (entrant, summaries[way]) for way, entrant in contest.entrants.items()}


def table(results: Mapping[str, tuple[Entrant, Summary]]) -> Table:
    """The comparison, in env-steps/s and relative to ``AsyncVectorEnv``."""
    comparison = Table(title=f"{NUM_ENVS} {ENV} envs, medians of {REPEATS} interleaved repeats")
    comparison.add_column("stepped by")
    for name in ("processes", "env-steps/s", "to AsyncVectorEnv"):
        comparison.add_column(name, justify="right")
    for way in (TCP, IPC, ASYNC):
        entrant, summary = results[way]
        ratio = summary.rate / results[ASYNC][1].rate
        comparison.add_row(way, str(entrant.processes), f"{summary.rate:,.0f}", f"{ratio:.2f}x")
    return comparison
