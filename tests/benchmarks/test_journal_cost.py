"""What the journal for replays costs, beside a hub that keeps none.

``pytest -m benchmark -n 0 -s tests/benchmarks/test_journal_cost.py``. The ratios are printed with their targets; they
fail no test.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from hubs import serve

import envhub

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

SECONDS = 0.1
PAIRS = 40  # of turns
ROUNDS = 8  # with new hubs each, since two hubs of one kind differ by up to 3 % as long as they live


@pytest.mark.parametrize(("env", "num_envs"), [("CartPole-v1", 64), ("ALE/Pong-v5", 16)])
def test_steps_with_a_journal(env: str, num_envs: int, tmp_path: Path) -> None:
    rounds = []
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        rounds.append(statistics.median(_pairs(env, num_envs, folder, number)))
    rounds.sort()
    print(
        f"\nsteps with a journal, {env}, {num_envs} envs: {statistics.median(rounds):.3f} of the rate without "
        f"(target 0.98; {ROUNDS} rounds of {PAIRS} pairs: {' '.join(f'{ratio:.3f}' for ratio in rounds)})"
    )
    assert rounds[0] > 0


def _pairs(env: str, num_envs: int, folder: Path, number: int) -> list[float]:
    """The rate with a journal by the one without, of turns that are short, so that what else runs concerns both."""
    with ExitStack() as hubs:
        rates: dict[str, Callable[[], float]] = {}
        ways = [("without", "0"), ("with", "10")]
        for way, most in ways if number % 2 else reversed(ways):
            (own := folder / way).mkdir()
            hub = hubs.enter_context(serve(own, env, "--replays", str(own), "--replays-max", most))
            envs = hubs.enter_context(closing(envhub.make_vec(env, num_envs, hub=hub.ipc, num_workers=2)))
            envs.reset(seed=0)
            actions = envs.action_space.sample()
            for _ in range(1000):  # beyond the first episodes, when random numbers are noted as well
                envs.step(actions)
            rates[way] = _rate(envs, actions)
        pairs = []
        for turn in range(PAIRS):
            found = {way: rates[way]() for way in (sorted(rates) if turn % 2 else sorted(rates, reverse=True))}
            pairs.append(found["with"] / found["without"])
    return pairs


def _rate(envs: envhub.HubVectorEnv, actions: np.ndarray) -> Callable[[], float]:
    def measure() -> float:
        count, began_s = 0, time.perf_counter()
        while time.perf_counter() < began_s + SECONDS:
            envs.step(actions)
            count += envs.num_envs
        return count / (time.perf_counter() - began_s)

    return measure
