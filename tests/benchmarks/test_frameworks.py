"""Steps through the interfaces of training frameworks over a hub, beside their own vector envs of worker processes.

``pytest -m benchmark -n 0 -s tests/benchmarks/test_frameworks.py``. The ratios are printed with their targets; they
fail no test.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hubs import serve
from turns import tell_ratios

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

SECONDS, STEPS = 1.0, 200
MAKE = functools.partial(gymnasium.make, "CartPole-v1")


@pytest.fixture
def tcp(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with serve(tmp_path, "CartPole-v1") as hub:
        yield {"hub": hub.tcp, "lane": "wire"}


def compare(measure: str, rate_of: Callable[[Any], float], targets: dict[str, float], makes: dict[str, Any]) -> None:
    with contextlib.ExitStack() as stack:
        envs = {way: stack.enter_context(contextlib.closing(make())) for way, make in makes.items()}
        for each in envs.values():
            each.reset()
        rates = {way: functools.partial(rate_of, each) for way, each in envs.items()}
        tell_ratios(measure, rates, next(iter(makes)), targets)


def sb3_steps_per_second(envs: Any) -> float:
    actions = np.array([envs.action_space.sample() for _ in range(envs.num_envs)])
    start_s, steps = time.perf_counter(), 0
    while time.perf_counter() - start_s < SECONDS:
        envs.step(actions)
        steps += envs.num_envs
    return steps / (time.perf_counter() - start_s)


@pytest.mark.parametrize(("num_envs", "private", "wire"), [(16, 3.0, 1.8), (64, 8.0, 6.0)])
def test_sb3_steps(num_envs: int, private: float, wire: float, tcp: dict[str, Any]) -> None:
    vec_env: Any = pytest.importorskip("stable_baselines3.common.vec_env")
    from stable_baselines3.common.env_util import make_vec_env

    from envhub.sb3 import HubVecEnv

    # Forked from a program that has imported PyTorch already: with the default start method 64 of them take 20 GB.
    forked = {"vec_env_cls": vec_env.SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}
    compare(
        f"SB3 step, CartPole-v1, {num_envs} envs",
        sb3_steps_per_second,
        {"private hub": private, "tcp": wire},
        {
            "SubprocVecEnv": lambda: make_vec_env("CartPole-v1", num_envs, **forked),
            "private hub": lambda: make_vec_env("CartPole-v1", num_envs, vec_env_cls=HubVecEnv),
            "tcp": lambda: HubVecEnv("CartPole-v1", num_envs, **tcp),
        },
    )


def tianshou_steps_per_second(envs: Any) -> float:
    """With the resets of envs whose episode has ended, as a collector makes them."""
    ids = np.arange(len(envs))
    actions = ids % 2
    steps, start_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - start_s) < SECONDS:
        _, _, terminations, truncations, _ = envs.step(actions, ids)
        steps += len(ids)
        if (ended := terminations | truncations).any():
            envs.reset(ids[ended])
        actions = 1 - actions
    return steps / taken_s


@pytest.mark.parametrize(("num_envs", "private", "wire"), [(16, 2.0, 1.2), (64, 5.0, 4.0)])
def test_tianshou_steps(num_envs: int, private: float, wire: float, tcp: dict[str, Any]) -> None:
    env: Any = pytest.importorskip("tianshou.env")
    from envhub.tianshou import HubVectorEnv

    compare(
        f"tianshou step and resets, CartPole-v1, {num_envs} envs",
        tianshou_steps_per_second,
        {"private hub": private, "tcp": wire},
        {
            "ShmemVectorEnv": lambda: env.ShmemVectorEnv([MAKE] * num_envs),
            "private hub": lambda: HubVectorEnv([MAKE] * num_envs),
            "tcp": lambda: HubVectorEnv("CartPole-v1", num_envs, **tcp),
        },
    )


def test_torchrl_collection(tcp: dict[str, Any]) -> None:
    envs: Any = pytest.importorskip("torchrl.envs")
    import torch
    from torchrl.collectors import Collector

    from envhub.torchrl import make_env

    torch.set_num_threads(1)
    num_envs = 16
    made = {
        "GymEnv": envs.GymEnv("CartPole-v1", num_envs=num_envs),
        "private hub": make_env("CartPole-v1", num_envs),
        "tcp": make_env("CartPole-v1", num_envs, **tcp),
    }
    collectors = {
        way: Collector(env, None, frames_per_batch=STEPS * num_envs, total_frames=-1) for way, env in made.items()
    }
    batches = {way: iter(collector) for way, collector in collectors.items()}

    def collected(way: str) -> float:
        start_s = time.perf_counter()
        next(batches[way])
        return STEPS * num_envs / (time.perf_counter() - start_s)

    for way in made:
        next(batches[way])
    rates = {way: functools.partial(collected, way) for way in made}
    tell_ratios(f"TorchRL collector, CartPole-v1, {num_envs} envs", rates, "GymEnv", {"private hub": 6.0, "tcp": 4.0})
    for collector in collectors.values():
        collector.shutdown()
