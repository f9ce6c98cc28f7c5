"""A worker killed while it writes an observation of 80 MB tears none: the last whole one is returned."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from chaos.chain_env import ChainEnv
from chaos.checker import Batch, Checker
from hubs import worker_processes

import envhub

ELEMENTS = 10_000_000
SERVED_S = 1.1  # who has served for a second is started again at once


def torture(seed: int, times: int, num_envs: int, lane: str) -> None:
    """Step envs that have a worker each, and kill these at some moment of a step."""
    options = {"restarts_max": 100_000, "copy": False, "lane": lane, "num_workers": num_envs}
    chance, checker, number = random.Random(seed), Checker(num_envs), 0
    with closing(envhub.make_vec(lambda: ChainEnv(ELEMENTS), num_envs, **options)) as envs:
        checker.reset(*envs.reset())

        def step() -> float:
            nonlocal number
            number += 1
            begun_s = time.monotonic()
            batch = Batch(*envs.step(np.array([[row, number] for row in range(num_envs)])))
            took_s = time.monotonic() - begun_s
            checker.step([number] * num_envs, batch)
            return took_s

        for _ in range(times):
            until_s, step_s = time.monotonic() + SERVED_S, 0.0
            while time.monotonic() < until_s:
                step_s = step()
            killers = [
                threading.Timer(chance.uniform(0, step_s), worker.kill) for worker in worker_processes(os.getpid())
            ]
            for killer in killers:
                killer.start()
            step()
            for killer in killers:
                killer.join()
            step()
        print(f"seed {seed}, {envs.lane}: {times} x {num_envs} kills, {checker.tally}")
        assert not checker.tally.wrong, checker.tally.findings
        # The last ones may show in a step that was not made.
        assert checker.tally.truncations["crash"] > num_envs * (times - 1) / 2


CHAOS = pytest.mark.chaos, pytest.mark.timeout(7200)


@pytest.mark.parametrize(
    ("seed", "times", "num_envs", "lane"),
    [
        *(pytest.param(1, 2, 1, lane, marks=pytest.mark.long) for lane in ("auto", "wire")),
        *(pytest.param(*each, marks=CHAOS) for each in ((2, 170, 3, "auto"), (2, 100, 1, "wire"))),
    ],
)
def test_observation_is_whole_though_its_worker_died_writing_it(
    seed: int, times: int, num_envs: int, lane: str
) -> None:
    torture(seed, times, num_envs, lane)
