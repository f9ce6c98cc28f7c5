"""Command ``envhub demo``: learn CartPole-v1 through a hub, as a remote trainer would, then compare ways to step.

The learner is ``client/examples/cem_cartpole.py``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from functools import partial

from rich.console import Console
from rich.table import Table

import envhub
from envhub_client.tools import cem_cartpole
from envhub_client.tools.bench.entrant import ASYNC, IPC, TCP, Entrant, Task, async_entrant, vector_entrant
from envhub_client.tools.bench.served_hub import ServedHub, served_hub
from envhub_client.tools.bench.timing import Summary, interleave, summarize

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
    with contextlib.ExitStack() as stack:
        entrants = {ASYNC: stack.enter_context(async_entrant(task))}  # first, since it forks
        for way, address in ((TCP, hub.tcp), (IPC, hub.ipc)):
            made = partial(envhub.make_vec, ENV, NUM_ENVS, hub=address)
            entrants[way] = stack.enter_context(vector_entrant(task, made))
        steps = {way: entrant.step for way, entrant in entrants.items()}
        times = interleave(steps, SECONDS, REPEATS)
    return {way: (entrant, summarize(entrant.env_steps, times[way])) for way, entrant in entrants.items()}


def table(results: Mapping[str, tuple[Entrant, Summary]]) -> Table:
    """The comparison, in env-steps/s and relative to ``AsyncVectorEnv``."""
    found = Table(title=f"{NUM_ENVS} {ENV} envs, medians of {REPEATS} interleaved repeats")
    found.add_column("stepped by")
    for name in ("processes", "env-steps/s", "to AsyncVectorEnv"):
        found.add_column(name, justify="right")
    for way in (TCP, IPC, ASYNC):
        entrant, summary = results[way]
        ratio = summary.rate / results[ASYNC][1].rate
        found.add_row(way, str(entrant.processes), f"{summary.rate:,.0f}", f"{ratio:.2f}x")
    return found
