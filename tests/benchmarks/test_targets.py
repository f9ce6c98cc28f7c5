"""What the design wants of speed, each measure beside its yardstick in the same run: ``pytest -m benchmark -n 0 -s``.

Ratios are printed with the target; none fails a test, for the machine and its noise are nobody's fault.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import gymnasium as gym
import numpy as np
import psutil
import pytest
from envhub_client.private_hub.process import private_hub
from envhub_client.tools import bench
from envhub_client.tools.bench import ASYNC, PRIVATE, SYNC, TCP, Result, ServedHub, served_hub
from gymnasium.vector import AsyncVectorEnv, VectorEnv
from side_by_side.echo import ECHO, ONE_WAY, nbytes, yardsticks
from side_by_side.workloads import entry, images

import envhub
from envhub.values.actions import RESULT_BYTES

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

REPEATS = 5
SECONDS = 1.0
CPUS = len(os.sched_getaffinity(0))
IDLE_SESSIONS, IDLE_S = 8, 10.0


@pytest.fixture(scope="module")
def hub() -> Iterator[ServedHub]:
    with served_hub("CartPole-v1", entry("images")) as running:
        yield running


def told(measure: str, target: str, found: float, detail: str = "") -> None:
    print(f"\n{measure}: {found:.2f} (target {target}){'; ' + detail if detail else ''}")


def race(env: str, num_envs: int, hub: ServedHub) -> dict[str, Result]:
    make = bench.factory(entry(env))
    ways = bench.ways(entry(env), make, num_envs, hub)
    ways = {way: ways[way] for way in (ASYNC, SYNC, PRIVATE, TCP)}
    return bench.timed({**ways, **yardsticks(make, num_envs)}, SECONDS, REPEATS)


def of_async(found: dict[str, Result], way: str) -> float:
    return bench.rate(found[way]) / bench.rate(found[ASYNC])


def test_cartpole(hub: ServedHub) -> None:
    shared = {1: "5, stretch 7", 16: "4, stretch 5", 64: "8, stretch 12"}
    wire = {16: "2", 64: "7"}
    for num_envs in (1, 16, 64):
        found = race("CartPole-v1", num_envs, hub)
        told(f"shared lane to AsyncVectorEnv, {num_envs} envs", f">= {shared[num_envs]}", of_async(found, PRIVATE))
        if num_envs in wire:
            told(f"tcp to AsyncVectorEnv, {num_envs} envs", f">= {wire[num_envs]}", of_async(found, TCP))
        if num_envs == 1:
            ratio = found[TCP].batch_us / found[ECHO].batch_us
            detail = f"{found[TCP].batch_us:.0f} to {found[ECHO].batch_us:.0f} µs"
            told("tcp round trip of one env to raw pyzmq's", "<= 1.6", ratio, detail)
        if num_envs == 64:
            ratio = bench.rate(found[PRIVATE]) / (CPUS * bench.rate(found[SYNC]))
            told(f"shared lane, 64 envs, to {CPUS} x SyncVectorEnv", ">= 0.35, stretch 0.6", ratio)


def test_process_per_env() -> None:
    for num_envs, target in ((16, ">= 2.5"), (64, ">= 3")):
        factories = [bench.factory("CartPole-v1")] * num_envs
        ways: bench.Ways = {
            ASYNC: partial(AsyncVectorEnv, factories),
            PRIVATE: partial(envhub.make_vec, factories, num_workers=num_envs),
        }
        told(
            f"a worker per env to AsyncVectorEnv, {num_envs} envs",
            target,
            of_async(bench.timed(ways, SECONDS, REPEATS), PRIVATE),
        )
    memory_mb = {}
    with contextlib.closing(AsyncVectorEnv(factories)) as others:
        others.reset(seed=1)
        memory_mb[ASYNC] = pss_mb(*(psutil.Process(process.pid) for process in others.processes))
    with contextlib.closing(envhub.make_vec(factories, num_workers=num_envs)) as envs:
        envs.reset(seed=1)
        memory_mb[PRIVATE] = pss_mb(psutil.Process(private_hub().pid))
    detail = f"{memory_mb[PRIVATE]:.0f} to {memory_mb[ASYNC]:.0f} MB"
    told(
        "memory of 64 workers with their hub to AsyncVectorEnv's", "<= 1", memory_mb[PRIVATE] / memory_mb[ASYNC], detail
    )
    makes = {
        "ours": lambda: envhub.make_vec("CartPole-v1", 64, num_workers=64),
        "theirs": lambda: gym.make_vec("CartPole-v1", 64, vectorization_mode="async"),
    }
    seconds = {way: [seconds_until_made(make) for _ in range(REPEATS)] for way, make in makes.items()}
    ours, theirs = map(np.median, seconds.values())
    detail = f"AsyncVectorEnv's {theirs:.2f}"
    told("seconds until 64 workers are ready on a warm hub", "<= 0.2", float(ours), detail)


def test_process_per_env_of_a_program_that_trains() -> None:
    """``AsyncVectorEnv`` forks the program with all that it has imported; a hub's workers have none of that."""
    pytest.importorskip("torch")
    test_process_per_env()


def seconds_until_made(make: Callable[[], VectorEnv]) -> float:
    begun_s = time.perf_counter()
    envs = make()
    taken_s = time.perf_counter() - begun_s
    envs.close()
    return taken_s


def test_images(hub: ServedHub) -> None:
    found = race("images", 64, hub)
    told("shared lane to AsyncVectorEnv, 64 image envs", ">= 5", of_async(found, PRIVATE))
    reply = nbytes(images().observation_space) + RESULT_BYTES
    steps, messages = bench.rate(found[TCP]) / 64, bench.rate(found[ONE_WAY]) / 64
    detail = f"{steps * reply * 64 / 1e9:.2f} to {messages * reply * 64 / 1e9:.2f} GB/s"
    told("tcp, 64 image envs, to raw pyzmq one way", ">= 0.75", steps / messages, detail)


def test_idle_sessions(hub: ServedHub) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE_SESSIONS):
            envs = stack.enter_context(contextlib.closing(envhub.make_vec("CartPole-v1", 8, hub=hub.ipc)))
            envs.reset()
            envs.step(envs.action_space.sample())
        before_s = cpu_s(hub.pid)
        time.sleep(IDLE_S)
        share = (cpu_s(hub.pid) - before_s) / IDLE_S
    told(f"cores that a hub with {IDLE_SESSIONS} idle sessions keeps busy, workers included", "<= 0.01", share)


def cpu_s(pid: int) -> float:
    """CPU time of a process and of all below it."""
    root = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (root, *root.children(recursive=True)))


def test_start_and_memory(hub: ServedHub) -> None:
    envhub.make_vec("CartPole-v1", 1, hub=hub.ipc).close()
    taken_s = []
    for _ in range(REPEATS):
        begun_s = time.perf_counter()
        envs = envhub.make_vec("CartPole-v1", 64, hub=hub.ipc, num_workers=4)
        taken_s.append(time.perf_counter() - begun_s)
        envs.reset(seed=1)
        ours = pss_mb(psutil.Process(hub.pid))
        envs.close()
    told("seconds for 64 envs on a warm hub", "<= 0.5", float(np.median(taken_s)))
    others = AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 64, context="fork")
    others.reset(seed=1)
    theirs = pss_mb(*(psutil.Process(process.pid) for process in others.processes))
    others.close()
    told("memory to fork-mode AsyncVectorEnv's workers", "<= 0.5", ours / theirs, f"{ours:.0f} to {theirs:.0f} MB PSS")
    program = "import time; begun = time.perf_counter(); import envhub; envhub.make_vec('CartPole-v1', 64); "
    program += "print(time.perf_counter() - begun)"
    cold_s = [float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(REPEATS)]
    told("seconds for 64 envs from nothing", "<= 1.5", float(np.median(cold_s)))


def pss_mb(*roots: psutil.Process) -> float:
    """What these processes and all below them take of the memory, what they share divided among them."""
    everybody = [process for root in roots for process in (root, *root.children(recursive=True))]
    return sum(process.memory_full_info().pss for process in everybody) / 1e6
