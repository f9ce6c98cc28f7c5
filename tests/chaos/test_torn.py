"""A worker killed while it writes an observation of 80 MB tears none: the last whole one is returned."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from chaos.chain_env import ChainEnv
from chaos.checker import Batch, Checker
from hubs import worker_processes

import envhub

ELEMENTS = 10_000_000
WAIT_S = 60.0
SERVED_S = 1.1  # who has served for a second is started again at once


class Torturer:
    """Steps envs of large observations, each with a worker of its own, and kills these at some moment of a step."""

    def __init__(self, envs: Any, seed: int) -> None:
        self.envs = envs
        self.checker = Checker(envs.num_envs)
        self._chance = random.Random(seed)
        self._number = 0
        self.checker.reset(*envs.reset())

    def step(self) -> float:
        """One step; returns how long it took."""
        self._number += 1
        begun_s = time.monotonic()
        rows = self.envs.num_envs
        self.envs.step_async(np.array([[row, self._number] for row in range(rows)]))
        batch = Batch(*self.envs.step_wait(timeout=WAIT_S))
        took_s = time.monotonic() - begun_s
        self.checker.step([self._number] * rows, batch)
        return took_s

    def torture(self) -> None:
        """Let the workers serve for a while, and then kill each in the same step."""
        until_s, step_s = time.monotonic() + SERVED_S, 0.0
        while time.monotonic() < until_s:
            step_s = self.step()
        killers = [
            threading.Timer(self._chance.uniform(0, step_s), worker.kill) for worker in worker_processes(os.getpid())
        ]
        for killer in killers:
            killer.start()
        self.step()
        for killer in killers:
            killer.join()
        self.step()


def torture(seed: int, times: int, num_envs: int, lane: str) -> None:
    options = {"restarts_max": 100_000, "copy": False, "lane": lane, "num_workers": num_envs}
    with closing(envhub.make_vec(lambda: ChainEnv(ELEMENTS), num_envs, **options)) as envs:
        torturer = Torturer(envs, seed)
        for _ in range(times):
            torturer.torture()
        tally = torturer.checker.tally
        print(f"seed {seed}, {envs.lane}: {times} x {num_envs} kills, {tally}")
        assert not tally.wrong, tally.findings
        # The last ones may show in a step that was not made.
        assert tally.truncations["crash"] > num_envs * (times - 1) / 2


@pytest.mark.long
@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_observation_is_whole_though_its_worker_died_writing_it(lane: str) -> None:
    torture(1, 2, 1, lane)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("lane", "times", "num_envs"), [("auto", 170, 3), ("wire", 100, 1)])
def test_observation_is_whole_after_hundreds_of_deaths(lane: str, times: int, num_envs: int) -> None:
    torture(2, times, num_envs, lane)
