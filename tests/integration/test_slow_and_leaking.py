"""Simulators that take long to make, or that take more and more memory."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import sims

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


@pytest.mark.parametrize("value", [-1, 1.5, "1GB", True])
def test_memory_max_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="memory_max must be a number of bytes"):
        envhub.make_vec(sims.Hoarder, memory_max=value)
