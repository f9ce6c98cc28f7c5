"""Simulators that take long to make, or that take more and more memory."""

from __future__ import annotations

import os
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sims
import test_placement
from hubs import kill_worker, wait_until, worker_processes

import envhub

MIB = 1 << 20
MEMORY_MAX = 400 * MIB  # a worker has less than half of it before it hoards anything
OVERRUN_S = 10.0


def make(kind: Any, num_envs: int, address: str | None, **options: Any) -> envhub.HubVectorEnv:
    """This env of ``sims``: by factory from a private hub, by name from a served one."""
    if address is None:
        arguments = options.pop("env_kwargs", {})
        return envhub.make_vec([lambda: kind(**arguments)] * num_envs, **options)
    return envhub.make_vec(kind.__name__.lower(), num_envs, hub=address, **options)


def step_until_failure(envs: envhub.HubVectorEnv, actions: list[int]) -> tuple[np.ndarray, Any]:
    """Step with these actions and then 0 until an env is truncated; returns what it showed last, and failures."""
    end_s = time.monotonic() + OVERRUN_S
    while time.monotonic() < end_s:
        observations, _, _, truncations, infos = envs.step(actions)
        if truncations.any():
            return observations, infos["env_failure"]
        actions = [0] * envs.num_envs
    raise AssertionError("no env was truncated")


@pytest.mark.parametrize("by_child", [False, True])
def test_worker_with_too_much_memory_is_a_truncation_that_says_so(address: str | None, by_child: bool) -> None:
    arguments = {"by_child": by_child}
    with closing(make(sims.Hoarder, 2, address, num_workers=2, memory_max=MEMORY_MAX, env_kwargs=arguments)) as envs:
        envs.reset()
        envs.step([50, 100])
        observations, failures = step_until_failure(envs, [0, 500])
        assert failures[0] is None and failures[1].cause == "memory"
        assert f"more than memory_max={MEMORY_MAX} bytes" in failures[1].message
        pid = observations[0, 1]
        observations, *_ = envs.step([0, 0])
        assert observations[1, 0] == 0 and observations[0, 1] == pid  # the one begins again, the other goes on


def test_memory_max_raises_where_crashes_do() -> None:
    with closing(envhub.make_vec(sims.Hoarder, memory_max=MEMORY_MAX, on_crash="raise")) as envs:
        envs.reset()
        with pytest.raises(envhub.WorkerDied, match="memory_max"):
            step_until_failure(envs, [500])


def noted(path: Path, count: int) -> list[int]:
    """The processes that have begun to make an env, once there are so many."""
    assert wait_until(lambda: len(path.read_text().splitlines()) >= count, 20)
    return [int(line) for line in path.read_text().splitlines()]


def test_lost_env_is_back_without_another_being_made(address: str | None, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    arguments = {"seconds": 0.5, "notes": str(notes)}
    with closing(make(sims.SlowToMake, 2, address, num_workers=2, spares=1, env_kwargs=arguments)) as envs:
        envs.reset()
        spare, lost = 2, 1
        for _ in range(2):
            pids = envs.step([0, 0])[0][:, 1]
            begun = noted(notes, spare + 1)
            kill_worker(int(pids[lost]))
            _, _, _, truncations, infos = envs.step([0, 0])
            assert truncations.tolist() == [row == lost for row in range(2)]
            assert infos["env_failure"][lost].cause == "crash"
            observations = envs.step([0, 0])[0]
            assert observations[lost].tolist() == [0, begun[spare]] and observations[1 - lost, 1] == pids[1 - lost]
            spare, lost = spare + 1, 1 - lost


def test_spare_has_the_device_of_the_worker_whose_place_it_takes() -> None:
    with closing(envhub.make_vec(test_placement.Placed, 5, num_workers=2, gpus=[0, 1], spares=2)) as envs:
        places, devices = envs.call("environment", "ENVHUB_ENV_INDICES"), envs.call("device")
        assert places == ("0,2,4", "1,3", "0,2,4", "1,3", "0,2,4") and devices[1] == ["1"] * 3
        envs.reset()
        assert wait_until(lambda: len(worker_processes(os.getpid())) == 4)
        for lost in (1, 0, 1, 0):
            kill_worker(envs.call("pid")[lost])
            assert envs.call("environment", "ENVHUB_ENV_INDICES") == places and envs.call("device") == devices
            envs.reset()


def test_spare_of_factories_that_differ_fits_its_own_worker_only() -> None:
    factories = [partial(sims.Counter, length) for length in (2, 3, 4)]
    with closing(envhub.make_vec(factories, num_workers=3, spares=3)) as envs:
        for lost in range(3):
            envs.reset()
            kill_worker(envs.call("pid")[lost])
            assert envs.get_attr("length") == (2, 3, 4)


def test_spares_that_fail_are_not_made_again_and_again(tmp_path: Path) -> None:
    class OnlyTwo(sims.Counter):
        def __init__(self) -> None:
            with (tmp_path / "made").open("a+") as file:
                file.write("x")
                file.seek(0)
                if len(file.read()) > 2:
                    raise RuntimeError("there are two licences")
            super().__init__()

    with closing(envhub.make_vec(OnlyTwo, 2, num_workers=2, spares=1)) as envs:
        envs.reset()
        assert wait_until(lambda: len((tmp_path / "made").read_text()) == 3)
        for _ in range(100):
            envs.step([0, 0])
        assert len((tmp_path / "made").read_text()) <= 4


@pytest.mark.parametrize("value", [-1, 1.5, "1GB", True])
def test_memory_max_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="memory_max must be a number of bytes"):
        envhub.make_vec(sims.Hoarder, memory_max=value)
