"""What one session costs another on the same hub. Timings are printed as ratios; none fails a test."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hubs import serve

import envhub

REPEATS = 5
SECONDS = 1.0


def steps_per_second(envs: envhub.HubVectorEnv) -> float:
    actions = np.zeros(envs.num_envs, int)
    begun = time.perf_counter()
    count = 0
    while time.perf_counter() - begun < SECONDS:
        envs.step(actions)
        count += 1
    return count / (time.perf_counter() - begun)


@pytest.mark.benchmark
def test_session_with_slow_envs_beside_a_quick_one(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", "naughty=sims:naughty") as hub:
        quick = envhub.make_vec("CartPole-v1", 16, hub=hub.tcp)
        slow = envhub.make_vec("naughty", 8, hub=hub.tcp)
        quick.reset(seed=1)
        slow.reset()
        steps_per_second(quick)
        alone, beside, slow_steps = [], [], 0
        for _ in range(REPEATS):
            alone.append(steps_per_second(quick))
            stop = threading.Event()

            def step_slowly(stop: threading.Event = stop) -> None:
                nonlocal slow_steps
                while not stop.is_set():
                    slow.step(np.full(8, 6))  # every env sleeps 0.2 s
                    slow_steps += 1

            neighbour = threading.Thread(target=step_slowly)
            neighbour.start()
            beside.append(steps_per_second(quick))
            stop.set()
            neighbour.join()
        quick.close()
        slow.close()
    ratios = [with_it / without for with_it, without in zip(beside, alone, strict=True)]
    print(
        f"\n16 CartPole envs, batched steps/s: alone {statistics.median(alone):.0f}, beside 8 sleeping envs "
        f"{statistics.median(beside):.0f}, ratio {statistics.median(ratios):.2f} (of {REPEATS} pairs: "
        f"{min(ratios):.2f}-{max(ratios):.2f}); the neighbour made {slow_steps} steps"
    )
    assert slow_steps > 0
