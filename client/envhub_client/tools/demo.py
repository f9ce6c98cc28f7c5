"""Command ``envhub demo``: learn CartPole-v1 through a hub, as a remote trainer would, then compare ways to step.

The learner is ``client/examples/cem_cartpole.py``.
"""

from __future__ import annotations

import sys

import gymnasium
from rich.console import Console

from envhub_client.tools import bench, cem_cartpole
from envhub_client.tools.served_hub import served_hub

ENV = "CartPole-v1"
NUM_ENVS = cem_cartpole.NUM_ENVS
SEED = 1
SECONDS, REPEATS = 0.5, 3


def run(console: Console) -> None:
    """Serve, learn, compare; the hub is gone afterwards, however this ends."""
    with served_hub(ENV) as hub:
        console.print(f"a hub serves {ENV} at {hub.tcp} and {hub.ipc}", soft_wrap=True)
        console.print(f"learning with {NUM_ENVS} envs over tcp:")
        if cem_cartpole.learn(hub.tcp, SEED, console) <= cem_cartpole.SOLVED:
            sys.exit(1)
        console.print("stepping over tcp, over ipc, and by AsyncVectorEnv, in turn:")
        ways = bench.ways(ENV, lambda: gymnasium.make(ENV), NUM_ENVS, hub)
        results = bench.timed({way: ways[way] for way in (bench.ASYNC, bench.IPC, bench.TCP)}, SECONDS, REPEATS)
    console.print(bench.table(f"{NUM_ENVS} {ENV} envs, medians of {REPEATS} interleaved repeats", results))
