"""What snapshots take of CPU time and memory, beside a fork of an empty process and each simulator's own way.

Figures are printed; none fails a test. They are CPU times of all processes, since those pass over a busy machine.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
from envhub_server.ipc.process_marks import cpu_s
from hubs import lives, wait_until, worker_pid
from turns import tell_ratios

import envhub

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

TIMES, KEPT, STEPS = 40, 100, 100
RATE_S = 1.0
EMPTY = """
import os, resource, sys
for _ in range(int(sys.argv[1])):
    os.waitpid(os.fork() or os._exit(0), 0)
print(sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""
Way = tuple[Callable[[], Any], Callable[[Any], Any]]  # takes a state, and restores it


@contextmanager
def made(env: str, num_envs: int = 1) -> Iterator[Any]:
    with closing(envhub.make_vec(env, num_envs, snapshots=True)) as envs:
        envs.reset(seed=1)
        step(envs, 20)
        yield envs


def step(envs: Any, times: int) -> None:
    for _ in range(times):
        envs.step(envs.action_space.sample())


def empty_fork_s() -> float:
    """CPU time of a fork of a process with nothing in it."""

    def total(forks: int) -> float:
        return float(subprocess.check_output([sys.executable, "-ISc", EMPTY, str(forks)]))

    return (total(1000) - total(0)) / 1000


def each_s(act: Callable[[], Any], times: int = TIMES) -> float:
    """CPU time that one ``act`` takes of this process and all below it, also of those that end by it."""
    act()
    before_s = cpu_s(os.getpid())
    for _ in range(times):
        act()
    time.sleep(0.3)  # what ends by the last one is reaped
    return (cpu_s(os.getpid()) - before_s) / times


def own_way(name: str) -> Way | None:
    env: Any = gym.make(name)
    env.reset(seed=1)
    base = env.unwrapped
    if hasattr(base, "ale"):
        return base.ale.cloneState, base.ale.restoreState
    if hasattr(base, "data"):
        import mujoco
        import numpy as np

        what = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.empty(mujoco.mj_stateSize(base.model, what))
        return (
            lambda: mujoco.mj_getState(base.model, base.data, state, what),
            lambda _: mujoco.mj_setState(base.model, base.data, state, what),
        )
    return lambda: copy.deepcopy(env), copy.deepcopy


def own_times_s(way: Way) -> tuple[float, float]:
    take, restore = way
    state, times = take(), 200
    began_s = time.process_time()
    for _ in range(times):
        take()
    taken_s = time.process_time()
    for _ in range(times):
        restore(state)
    return (taken_s - began_s) / times, (time.process_time() - taken_s) / times


def private_bytes(pid: int) -> int:
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line[1]) << 10 for line in lines if line[0].startswith("Private"))


def snapshot_pid() -> int:
    """The process of the only snapshot."""

    def pids() -> list[int]:
        below = psutil.Process().children(recursive=True)
        return [each.pid for each in below if lives(each) and each.name() == "envhub-snapshot"]

    assert wait_until(lambda: len(pids()) == 1)
    return pids()[0]


@pytest.mark.parametrize("name", ["CartPole-v1", "ALE/Pong-v5", "HalfCheetah-v5"])
def test_taking_and_restoring(name: str) -> None:
    if name.startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
    own = own_times_s(own_way(name) or (lambda: None, lambda _: None))
    with made(name) as envs:
        empty_s, kept = empty_fork_s(), []
        take_s = each_s(lambda: kept.append(envs.snapshot()))
        restore_s = each_s(lambda: envs.restore(kept[0]))
        kept[:] = [envs.snapshot()]
        envs.snapshots()  # drops the others
        pid = snapshot_pid()
        at_once = private_bytes(pid)
        step(envs, STEPS)
        later = private_bytes(pid)
    for what, taken_s, own_s in (("take", take_s, own[0]), ("restore", restore_s, own[1])):
        print(
            f"\n{name}, {what}: {1e3 * taken_s:.1f} ms of CPU, {taken_s / empty_s:.0f} forks of an empty process "
            f"({1e3 * empty_s:.2f} ms); its own way {1e3 * own_s:.3f} ms"
        )
    print(f"{name}: {at_once / 1e6:.1f} MB of memory at once, {later / 1e6:.1f} after {STEPS} steps of its env")


@pytest.mark.parametrize("name", ["CartPole-v1", "ALE/Pong-v5"])
def test_rate_of_an_env_of_which_snapshots_are_kept(name: str) -> None:
    with made(name) as plain:
        first = worker_pid({})
        with made(name) as copied:
            second, kept = worker_pid({first}), []
            for _ in range(KEPT):
                step(copied, 1)
                kept.append(copied.snapshot())
            rates = {"without": _rate(plain, first), f"with {KEPT} snapshots": _rate(copied, second)}
            tell_ratios(f"{name}, steps by CPU time of the worker", rates, "without", {f"with {KEPT} snapshots": 0.95})


def _rate(envs: Any, pid: int) -> Callable[[], float]:
    def measure() -> float:
        count, end_s, before_s = 0, time.monotonic() + RATE_S, cpu_s(pid)
        while time.monotonic() < end_s:
            step(envs, 20)
            count += 20
        return count / max(cpu_s(pid) - before_s, 0.01)

    return measure


@pytest.mark.parametrize(("drops", "depths"), [(True, (1, 10, 50, 100, 200)), (False, (1, 8, 16, 22))])
def test_chain_of_snapshots_of_restored_envs(drops: bool, depths: tuple[int, ...]) -> None:
    """Each is taken of the env that was restored from the one before; ancestors are dropped, or kept."""
    with made("CartPole-v1") as envs:
        empty_s, kept = empty_fork_s(), [envs.snapshot()]
        for depth in range(1, max(depths) + 1):
            envs.restore(kept[-1])
            step(envs, 1)
            kept.append(envs.snapshot())
            if drops:
                del kept[:-1]
                gc.collect()
            if depth in depths:
                others: list[Any] = []
                taken_s = each_s(lambda: others.append(envs.snapshot()), 10)  # noqa: B023
                ways = "dropped" if drops else "kept"
                print(f"\nancestors {ways}, generation {depth}: {taken_s / empty_s:.0f} forks of an empty process")
