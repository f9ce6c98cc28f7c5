"""``HubVecEnv`` beside ``SubprocVecEnv``; needs ``stable-baselines3``, ``ale-py`` and ``gymnasium[mujoco]``.

``pytest -m benchmark -n 0 -s tests/benchmarks/test_frameworks_sb3.py``. The ratios are printed with their targets; they
fail no test.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hubs import serve
from turns import tell_ratios

pytest.importorskip("stable_baselines3")

from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from envhub.sb3 import HubVecEnv

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

SECONDS = 1.0
# Forked from a program that has imported PyTorch already: with the default start method 64 of them take 20 GB.
FORKED = {"start_method": "fork"}

# How long a program that imports PyTorch waits for its envs, and the memory that they take outside it.
STANDING = """
import os, time, torch, psutil
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv
from envhub.sb3 import HubVecEnv
if __name__ == "__main__":
    start_s = time.perf_counter()
    envs = make_vec_env("CartPole-v1", 16, vec_env_cls={way})
    envs.reset()
    ready_s = time.perf_counter() - start_s
    outside = sum(each.memory_full_info().pss for each in psutil.Process().children(recursive=True))
    print(f"{{ready_s:.2f}} s, {{outside / 2**20:.0f}} MiB PSS outside the program")
    envs.close()
"""


class OneMillisecond(gymnasium.Env[Any, Any]):
    """Computes for 1 ms a step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        end_s = time.perf_counter() + 1e-3
        while time.perf_counter() < end_s:
            pass
        return np.zeros(4, np.float32), 0.0, False, False, {}


def steps_per_second(envs: VecEnv) -> Callable[[], float]:
    """Measures how many env steps ``VecEnv.step`` makes in a second."""
    actions = np.array([envs.action_space.sample() for _ in range(envs.num_envs)])
    envs.reset()
    for _ in range(20):
        envs.step(actions)

    def measure() -> float:
        start_s, steps = time.perf_counter(), 0
        while time.perf_counter() - start_s < SECONDS:
            envs.step(actions)
            steps += envs.num_envs
        return steps / (time.perf_counter() - start_s)

    return measure


def race(measure: str, targets: dict[str, float], ways: dict[str, Callable[[], VecEnv]]) -> None:
    with ExitStack() as stack:
        made = {way: stack.enter_context(closing(make())) for way, make in ways.items()}
        rates = {way: steps_per_second(envs) for way, envs in made.items()}
        tell_ratios(measure, rates, "SubprocVecEnv", targets)


@pytest.mark.parametrize(("num_envs", "private", "tcp"), [(16, 3.0, 1.8), (64, 8.0, 6.0)])
def test_cartpole(num_envs: int, private: float, tcp: float, tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1") as hub:
        race(
            f"SB3 step, CartPole-v1, {num_envs} envs",
            {"private hub": private, "tcp": tcp},
            {
                "SubprocVecEnv": lambda: make_vec_env(
                    "CartPole-v1", num_envs, vec_env_cls=SubprocVecEnv, vec_env_kwargs=FORKED
                ),
                "private hub": lambda: make_vec_env("CartPole-v1", num_envs, vec_env_cls=HubVecEnv),
                "tcp": lambda: HubVecEnv("CartPole-v1", num_envs, hub=hub.tcp, lane="wire"),
            },
        )


def test_halfcheetah() -> None:
    race(
        "SB3 step, HalfCheetah-v5, 8 envs",
        {"private hub": 2.5},
        {
            "SubprocVecEnv": lambda: make_vec_env(
                "HalfCheetah-v5", 8, vec_env_cls=SubprocVecEnv, vec_env_kwargs=FORKED
            ),
            "private hub": lambda: make_vec_env("HalfCheetah-v5", 8, vec_env_cls=HubVecEnv),
        },
    )


@pytest.mark.parametrize("num_envs", [8, 16])
def test_atari(num_envs: int) -> None:
    pytest.importorskip("ale_py")
    race(
        f"SB3 step, BreakoutNoFrameskip-v4 as make_atari_env wraps it, {num_envs} envs",
        {"private hub": 1.0},
        {
            "SubprocVecEnv": lambda: make_atari_env(
                "BreakoutNoFrameskip-v4", num_envs, vec_env_cls=SubprocVecEnv, vec_env_kwargs=FORKED
            ),
            "private hub": lambda: make_atari_env("BreakoutNoFrameskip-v4", num_envs, vec_env_cls=HubVecEnv),
        },
    )


@pytest.mark.parametrize("num_envs", [2, 8, 16])
def test_envs_of_a_millisecond(num_envs: int) -> None:
    factories = [lambda: Monitor(OneMillisecond())] * num_envs
    race(
        f"SB3 step, envs of 1 ms, {num_envs} envs",
        {"private hub": 1.0},
        {"SubprocVecEnv": lambda: SubprocVecEnv(factories, **FORKED), "private hub": lambda: HubVecEnv(factories)},
    )


@pytest.mark.parametrize("way", ["HubVecEnv", "SubprocVecEnv"])
def test_standing(way: str, tmp_path: Path) -> None:
    program = tmp_path / "standing.py"
    program.write_text(STANDING.format(way=way))
    printed = [subprocess.run([sys.executable, program], check=True, capture_output=True, text=True) for _ in range(3)]
    for each in printed:
        print(f"\nsixteen SB3 envs, {way}: {each.stdout.strip()} (target for HubVecEnv: 1.5 s, 100 MB)")
    assert all(each.stdout for each in printed)
