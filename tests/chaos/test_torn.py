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
    """Steps one env of large observations and kills its worker at some moment of a step."""

    def __init__(self, envs: Any, seed: int) -> None:
        self.envs = envs
        self.checker = Checker(1)
        self._chance = random.Random(seed)
        self._number = 0
        self.checker.reset(*envs.reset())

    def step(self) -> float:
        """One step; returns how long it took."""
        self._number += 1
        begun_s = time.monotonic()
        self.envs.step_async(np.array([[0, self._number]]))
        batch = Batch(*self.envs.step_wait(timeout=WAIT_S))
        took_s = time.monotonic() - begun_s
        self.checker.step([self._number], batch)
        return took_s

    def torture(self) -> None:
        """Let the worker serve for a while, and then kill it in a step."""
        until_s, step_s = time.monotonic() + SERVED_S, 0.0
        while time.monotonic() < until_s:
            step_s = self.step()
        (worker,) = worker_processes(os.getpid())
        killer = threading.Timer(self._chance.uniform(0, step_s), worker.kill)
        killer.start()
        self.step()
        killer.join()
        self.step()


def torture(seed: int, kills: int, lane: str) -> None:
    options = {"restarts_max": 100_000, "copy": False, "lane": lane}
    with closing(envhub.make_vec(lambda: ChainEnv(ELEMENTS), 1, **options)) as envs:
        torturer = Torturer(envs, seed)
        for _ in range(kills):
            torturer.torture()
        tally = torturer.checker.tally
        print(f"seed {seed}, {envs.lane}: {kills} kills, {dict(tally.truncations)}, wrong {dict(tally.wrong)}")
        assert not tally.wrong, tally.findings
        assert tally.truncations["crash"] >= kills - 1  # the last one may show in a step that was not made


@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_observation_is_whole_though_its_worker_died_writing_it(lane: str) -> None:
    torture(1, 2, lane)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_observation_is_whole_after_each_of_five_hundred_deaths(lane: str) -> None:
    torture(2, 500, lane)
