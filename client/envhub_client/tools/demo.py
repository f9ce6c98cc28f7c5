"""What ``envhub demo`` does: learn CartPole-v1 through a hub, as a remote trainer would, then compare ways to step.

The learner is ``client/examples/cem_cartpole.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from envhub_client.tools import cem_cartpole
from envhub_client.tools.bench.contest import ASYNC, IPC, TCP, Contest, Result
from envhub_client.tools.bench.served_hub import ServedHub, served_hub

ENV = "CartPole-v1"
NUM_ENVS = cem_cartpole.NUM_ENVS
SEED = 1
SECONDS, REPEATS = 0.5, 3


def run(console: Console) -> None:
    """Serve, learn, compare; the hub is gone afterwards, however this ends.

    Args:
        console: where to print.

    Raises:
        HubUnreachable: the hub did not start.
        SystemExit: with status 1, where nothing was learned.
    """
    with served_hub(ENV) as hub:
        console.print(f"a hub serves {ENV} at {hub.tcp} and {hub.ipc}", highlight=False, soft_wrap=True)
        console.print(f"learning with {NUM_ENVS} envs over tcp:", highlight=False)
        if cem_cartpole.learn(hub.tcp, SEED, console) <= cem_cartpole.SOLVED:
            sys.exit(1)
        console.print("stepping over tcp, over ipc, and by AsyncVectorEnv, in turn:", highlight=False)
        results = compare(hub)
    console.print(table(results))


def compare(hub: ServedHub) -> dict[str, Result]:
    """Time the same stepping over tcp, over ipc, and by ``AsyncVectorEnv``, in turn."""
    with Contest(ENV, NUM_ENVS) as contest:
        contest.add_async()
        contest.add_hub(TCP, hub.tcp)
        contest.add_hub(IPC, hub.ipc)
        return contest.run(SECONDS, REPEATS)


def table(results: Mapping[str, Result]) -> Table:
    """The comparison, in env-steps/s and relative to ``AsyncVectorEnv``."""
    found = Table(title=f"{NUM_ENVS} {ENV} envs, medians of {REPEATS} interleaved repeats")
    found.add_column("stepped by")
    for name in ("processes", "env-steps/s", "to AsyncVectorEnv"):
        found.add_column(name, justify="right")
    for way in (TCP, IPC, ASYNC):
        rate = results[way].summary.rate
        ratio = rate / results[ASYNC].summary.rate
        found.add_row(way, str(results[way].processes), f"{rate:,.0f}", f"{ratio:.2f}x")
    return found
