"""Prints where the time of one batched step goes, hop by hop, on the shared lane, by wire over ipc, and over tcp.

cd tests/benchmarks
python -m hops 64
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time

import numpy as np
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.session.session import Session
from envhub_client.tools.served_hub import served_hub
from rich import box
from rich.console import Console
from rich.table import Table

import envhub
from envhub.protocol.messages import Hops, HopsRequest, Op

STEPS = 300
WARM_UP_STEPS = 50
SEED = 1
SHARED_HOPS = ("client encode", "wake", "env", "collect", "decode")
MEANINGS = {
    "client encode": "the batch of actions becomes bytes",
    "wire": "from there until the hub has received it",
    "hub": "until it has put the actions into the arena and rung every worker",
    "wake": "until the last worker has begun",
    "env": "until the last worker has ended: the envs themselves",
    "collect": "until the last worker has woken the hub, or on the shared lane the client",
    "hub's reply": "until the hub has given its reply away",
    "wire back": "until the client has received it",
    "decode": "until the step returns",
}
WIRE_HOPS = tuple(MEANINGS)


def budget(envs: HubVectorEnv) -> dict[str, float]:
    """Microseconds of each hop of one step, medians of ``STEPS``, and of the whole step as ``"step"``.

    The hub must be on this machine, whose clock all times are of. Of the workers the last to begin, and the last to
    end, count.
    """
    envs.action_space.seed(SEED)
    envs.reset(seed=SEED)
    hops: dict[str, list[float]] = {}
    for number in range(WARM_UP_STEPS + STEPS):
        for hop, nanoseconds in _one_step(envs).items() if number >= WARM_UP_STEPS else ():
            hops.setdefault(hop, []).append(nanoseconds / 1000)
    return {hop: float(np.median(values)) for hop, values in hops.items()}


def _one_step(envs: HubVectorEnv) -> dict[str, int]:
    actions, session = envs.action_space.sample(), envs._session
    assert isinstance(session, Session)
    connection = session.connection
    start = time.monotonic_ns()
    envs.step_async(actions)
    posted = time.monotonic_ns()
    envs.step_wait()
    end = time.monotonic_ns()
    sent, heard = connection.sent_ns, connection.heard_ns
    hops: Hops = connection.ask(Op.HOPS, HopsRequest()).message
    began, ended = max(hops.began), max(hops.ended)
    names: tuple[str, ...] = SHARED_HOPS
    passed = [start, posted, began, ended, getattr(session.lane, "woke_ns", end), end]
    if envs.lane == "wire":
        names = WIRE_HOPS
        passed = [start, sent, hops.heard, hops.rung, began, ended, hops.woke, hops.answered, heard, end]
    # What spins begins before the bell that would wake it: then a hop has taken no time.
    spent = [after - before for before, after in itertools.pairwise(itertools.accumulate(passed, max))]
    return {**dict(zip(names, spent, strict=True)), "step": end - start}


def main(num_envs: int, env: str = "CartPole-v1") -> None:
    with served_hub(env) as hub:
        by_way: dict[str, dict[str, float]] = {}
        for way, address, lane in (
            ("shared", hub.ipc, "auto"),
            ("wire, ipc", hub.ipc, "wire"),
            ("tcp", hub.tcp, "wire"),
        ):
            with contextlib.closing(envhub.make_vec(env, num_envs, hub=address, lane=lane)) as envs:
                by_way[way] = budget(envs)
    title = f"{env}: µs of one step of {num_envs} envs, medians of {STEPS}"
    rows = Table(title=title, box=box.SIMPLE, padding=0)
    rows.add_column("hop", no_wrap=True)
    for way in by_way:
        rows.add_column(way, justify="right", no_wrap=True)
    for hop in (*WIRE_HOPS, "step"):
        cells = [f"{spent[hop]:,.0f}" if hop in spent else "" for spent in by_way.values()]
        rows.add_row(f"[bold]{hop}" if hop == "step" else hop, *cells)
    Console().print(rows, *(f"{hop}: {meaning}" for hop, meaning in MEANINGS.items()), sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
