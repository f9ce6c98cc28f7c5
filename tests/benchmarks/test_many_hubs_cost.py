"""The cost of several hubs, next to one and next to the ideal: ``pytest -m benchmark -n 0 -s``, with ``-k`` for some.

Figures are printed; none fails a test, for the machine and its noise are nobody's fault. Ways are measured in turns.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pytest
from envhub_client.tools.bench import ServedHub, served_hub
from side_by_side.workloads import entry
from turns import TURNS

import envhub

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

COUNTS = (1, 2, 4, 8, 16, 32)
ENVS_EACH = 8
STEPS = 40
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


def stepped(envs: envhub.HubVectorEnv, steps: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of this clock that a step takes."""
    actions = np.zeros(envs.num_envs, np.int64)
    began_s = clock()
    for _ in range(steps):
        envs.step(actions)
    return (clock() - began_s) / steps


def in_turns(ways: Mapping[str, Callable[[], float]], turns: int = TURNS) -> dict[str, list[float]]:
    """What each way measures, once in each turn; the first turn does not count."""
    measured: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, measure in ways.items():
            value = measure()
            if turn:
                measured[way].append(value)
    return measured


def tell(title: str, measured: Mapping[str, Sequence[float]], unit: str, scale: float) -> None:
    """Print the median of each way, its least and most, and the median ratio to the first way of the same turn."""
    print(f"\n{title}")
    first = next(iter(measured.values()))
    for way, values in measured.items():
        ratio = statistics.median(one / other for one, other in zip(values, first, strict=True))
        low, middle, high = (scale * each for each in (min(values), statistics.median(values), max(values)))
        print(f"  {way:32} {middle:9.2f} {unit} ({low:.2f} to {high:.2f}), {ratio:.2f} of the first")


def test_cpu_of_the_client_for_each_further_hub() -> None:
    with hubs(max(COUNTS), CARTPOLE) as served, ExitStack() as stack:
        all_envs = {
            count: stack.enter_context(
                made(CARTPOLE, ENVS_EACH * count, [hub.tcp for hub in served[:count]], lane="wire")
            )
            for count in COUNTS
        }
        ways = {f"{count} hubs": partial(stepped, envs, STEPS, time.process_time) for count, envs in all_envs.items()}
        measured = in_turns(ways)
        tell(f"CPU of the client for a step of {ENVS_EACH} CartPoles on each hub", measured, "us", 1e6)
        medians = {count: statistics.median(measured[f"{count} hubs"]) for count in COUNTS}
        for fewer, more in pairwise(COUNTS):
            each_s = (medians[more] - medians[fewer]) / (more - fewer)
            print(f"  for each hub from {fewer} to {more}: {1e6 * each_s:.0f} us")


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
        ways = {name: partial(stepped, envs, STEPS) for name, envs in all_envs.items()}
        tell(f"a step of 64 {env}, lane {lane}", in_turns(ways), "ms", 1e3)


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
