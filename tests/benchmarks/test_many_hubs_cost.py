"""The cost of several hubs, next to one and next to the ideal: ``pytest -m benchmark -n 0 -s``, with ``-k`` for some.

Figures are printed; none fails a test, for the machine and its noise are nobody's fault. Ways are measured in turns.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
from envhub_client.tools import bench
from envhub_client.tools.bench import ServedHub, served_hub
from side_by_side.workloads import entry
from turns import tell_ratios

import envhub

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

ENVS_EACH = 8
STEPPED_S = 0.3
TRAINERS = (1, 4, 16)
TRAINED_S = 3.0
CARTPOLE = "CartPole-v1"


@contextmanager
def hubs(count: int, *envs: str) -> Iterator[list[ServedHub]]:
    with ExitStack() as stack:
        yield [stack.enter_context(served_hub(*envs)) for _ in range(count)]


@contextmanager
def made(
    env: str, num_envs: int, addresses: Sequence[str], workers: int = 1, **how: Any
) -> Iterator[envhub.HubVectorEnv]:
    """A vector env that is divided evenly among these hubs, each with so many workers."""
    count = len(addresses)
    split = [num_envs // count] * count if count > 1 else None
    envs = envhub.make_vec(env, num_envs, hub=addresses, split=split, num_workers=workers * count, **how)
    with closing(envs):
        envs.reset(seed=0)
        yield envs


def steps_per_second(envs: envhub.HubVectorEnv) -> float:
    return 1 / bench.times(envs.step, [np.zeros(envs.num_envs, np.int64)], STEPPED_S).mean()


def test_cpu_of_the_client_for_each_further_hub() -> None:
    taken_us = {}
    with hubs(4, CARTPOLE) as served:
        for count in (1, 4):
            addresses = [hub.tcp for hub in served[:count]]
            with made(CARTPOLE, ENVS_EACH * count, addresses, lane="wire") as envs:
                before_s = time.process_time()
                steps = len(bench.times(envs.step, [np.zeros(envs.num_envs, np.int64)], TRAINED_S))
                taken_us[count] = 1e6 * (time.process_time() - before_s) / steps
    print(f"\n{(taken_us[4] - taken_us[1]) / 3:.0f} us of the client's CPU in each step for each further hub")


@pytest.mark.parametrize("env", [CARTPOLE, "images"])
@pytest.mark.parametrize("lane", ["wire", "auto"])
def test_steps_over_several_hubs_next_to_one(env: str, lane: str) -> None:
    with hubs(4, entry(env)) as served, ExitStack() as stack:
        addresses = [hub.tcp if lane == "wire" else hub.ipc for hub in served]
        one = envhub.make_vec(env, 64, hub=addresses[0], num_workers=2, lane=lane)
        one.reset(seed=0)
        all_envs = {"one hub": stack.enter_context(closing(one))}
        for count, workers in ((1, 2), (2, 1), (4, 1)):
            all_envs[f"{count} in a list"] = stack.enter_context(made(env, 64, addresses[:count], workers, lane=lane))
        rates = {name: partial(steps_per_second, envs) for name, envs in all_envs.items()}
        targets = dict.fromkeys([*rates][1:], 1.0)
        tell_ratios(f"a step of 64 {env}, lane {lane}", rates, "one hub", targets)


def train(address: str, begin: Any, counts: Any) -> None:
    """Step 8 CartPoles from ``begin`` on for ``TRAINED_S`` seconds, and put the number of steps into ``counts``."""
    with made(CARTPOLE, ENVS_EACH, [address], lane="wire") as envs:
        begin.wait()
        end_s, count = time.perf_counter() + TRAINED_S, 0
        while time.perf_counter() < end_s:
            envs.step(np.zeros(ENVS_EACH, np.int64))
            count += 1
        counts.put(count)


def trained(served: Sequence[ServedHub], trainers: int) -> tuple[float, float]:
    """Requests of all trainers a second, and seconds of the hubs' CPU for each."""
    spawn = multiprocessing.get_context("spawn")
    begin, counts = spawn.Barrier(trainers + 1), spawn.Queue()
    for each in range(trainers):
        spawn.Process(target=train, args=(served[each % len(served)].tcp, begin, counts), daemon=True).start()
    begin.wait()
    before_s = cpu_s(served)
    total = sum(counts.get() for _ in range(trainers))
    return total / TRAINED_S, (cpu_s(served) - before_s) / total


def cpu_s(served: Sequence[ServedHub]) -> float:
    times = [psutil.Process(hub.pid).cpu_times() for hub in served]
    return sum(each.user + each.system for each in times)


def test_requests_of_many_trainers_over_one_hub_and_two() -> None:
    with hubs(2, CARTPOLE) as served:
        for trainers in TRAINERS:
            for count in (1, 2):
                rate, each_s = max(trained(served[:count], trainers) for _ in range(2))
                print(
                    f"\n{trainers} trainers over {count} hubs: {rate:.0f} requests a second, and "
                    f"{1e6 * each_s:.0f} us of the hubs' CPU for each"
                )
