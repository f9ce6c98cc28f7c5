"""A real trainer, the README's, learns to the end whatever happens to its workers and its connection."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from chaos.chaos_proxy import proxy
from envhub_client.tools.cem_cartpole import SOLVED, learn
from hubs import ServedHub, serve, wait_until
from rich.console import Console

SEED = 1
KILL_EVERY_S, CUT_EVERY_S = 2.0, 5.0
NAP_S = 0.0005
NUM_WORKERS = 8  # however few CPUs there are: fewer could not end an episode between two kills

console = Console()


@pytest.fixture
def cartpole_hub(tmp_path: Path) -> Iterator[ServedHub]:
    with serve(tmp_path, "CartPole-v1=odd_sims:slow_cartpole") as hub:
        yield hub


@contextlib.contextmanager
def every(period_s: float, act: Callable[[], bool]) -> Iterator[list[bool]]:
    """Do something all the time; whether it could be done, each time."""
    done: list[bool] = []
    over = threading.Event()

    def run() -> None:
        while not over.wait(period_s):
            done.append(act())

    actor = threading.Thread(target=run)
    actor.start()
    try:
        yield done
    finally:
        over.set()
        actor.join()


def kill_one(hub: ServedHub, generator: random.Random) -> bool:
    """Kill one of the hub's workers, once its session is made and if there is one."""
    workers = hub.workers() if "session_ready" in hub.log else []
    with contextlib.suppress(psutil.NoSuchProcess):
        if workers:
            generator.choice(workers).send_signal(signal.SIGKILL)
            return True
    return False


def losses(hub: ServedHub) -> int:
    """How many workers were killed that the hub had not told to end, as its log says by now."""
    return sum("was ended by SIGKILL" in line and '"level": "warning"' in line for line in hub.log.splitlines())


@pytest.mark.chaos
@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_trainer_learns_while_a_worker_is_killed_every_two_seconds(cartpole_hub: ServedHub, lane: str) -> None:
    generator = random.Random(SEED)
    with every(KILL_EVERY_S, lambda: kill_one(cartpole_hub, generator)) as kills:
        options = {"lane": lane, "num_workers": NUM_WORKERS, "restarts_max": 10_000, "nap_s": 4 * NAP_S}
        mean_return = learn(cartpole_hub.ipc, SEED, console, **options)
    print(f"lane {lane}: {sum(kills)} workers killed, mean return {mean_return}")
    assert mean_return > SOLVED
    # One that came as the session was closed is no loss; and the hub itself kills a worker that is still made then.
    assert sum(kills) >= 3 and wait_until(lambda: losses(cartpole_hub) >= sum(kills) - 1)
    assert losses(cartpole_hub) <= sum(kills)


@pytest.mark.chaos
def test_trainer_learns_the_same_while_its_connection_is_cut_every_five_seconds(cartpole_hub: ServedHub) -> None:
    undisturbed = learn(cartpole_hub.tcp, SEED, console, nap_s=0.0)
    with proxy(cartpole_hub.tcp) as between:
        with every(CUT_EVERY_S, lambda: between.cut() is None):
            mean_return = learn(between.address, SEED, console, nap_s=4 * NAP_S)
        print(f"{between.cuts} cuts, mean return {mean_return}")
        assert between.cuts >= 2 and cartpole_hub.log.count("client_back") >= between.cuts - 1
    assert mean_return == undisturbed > SOLVED
