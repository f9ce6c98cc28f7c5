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
PAIRS = 200


@pytest.mark.parametrize(("env", "num_envs"), [("CartPole-v1", 64), ("ALE/Pong-v5", 16)])
def test_steps_with_a_journal(env: str, num_envs: int, tmp_path: Path) -> None:
    with ExitStack() as hubs:
        rates: dict[str, Callable[[], float]] = {}
        for way, most in (("without", "0"), ("with", "10")):
            folder = tmp_path / way
            folder.mkdir()
            options = "--replays", str(folder), "--replays-max", most
            hub = hubs.enter_context(serve(folder, env, *options))
            envs = hubs.enter_context(closing(envhub.make_vec(env, num_envs, hub=hub.ipc, num_workers=2)))
            envs.reset(seed=0)
            actions = envs.action_space.sample()
            for _ in range(2000):  # beyond the first episodes, when random numbers are noted as well
                envs.step(actions)
            rates[way] = _rate(envs, actions)
        pairs = []
        for number in range(PAIRS):  # short and in turns, so that what else the machine does concerns both alike
            order = ("without", "with") if number % 2 else ("with", "without")
            found = {way: rates[way]() for way in order}
            pairs.append(found["with"] / found["without"])
    quarter = sorted(pairs)[PAIRS // 4], sorted(pairs)[3 * PAIRS // 4]
    print(
        f"\nsteps with a journal, {env}, {num_envs} envs: {statistics.median(pairs):.3f} of the rate without "
        f"(target 0.98; half of {PAIRS} pairs are within {quarter[0]:.2f} and {quarter[1]:.2f})"
    )
    assert min(pairs) > 0


def _rate(envs: envhub.HubVectorEnv, actions: np.ndarray) -> Callable[[], float]:
    def measure() -> float:
        count, began_s = 0, time.perf_counter()
        while time.perf_counter() < began_s + SECONDS:
            envs.step(actions)
            count += envs.num_envs
        return count / (time.perf_counter() - began_s)

    return measure
