"""Which envs are known to be fit to share a process."""

from __future__ import annotations

import functools
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from envhub_server.worker.row import EnvRunner
from envhub_server.worker.shared_process import may_share_process
from gymnasium.wrappers import TimeLimit, TransformReward


class Mine(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that may wait for whatever it likes."""


class MyRunner(EnvRunner):
    """Likewise."""


@pytest.mark.parametrize(
    "name",
    [
        *("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "ALE/Pong-v5"),
        *("FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"),
    ],
)
def test_envs_of_gymnasium_and_ale_may_share_a_process(name: str) -> None:
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(name)
    assert may_share_process(env, EnvRunner)
    assert may_share_process(TimeLimit(env, 10), EnvRunner)
    env.close()


def test_wrapper_or_runner_of_an_unknown_package_may_keep_something_per_process() -> None:
    env = gymnasium.make("CartPole-v1")
    assert not may_share_process(Mine(env), EnvRunner)
    assert not may_share_process(TimeLimit(Mine(env), 10), EnvRunner)
    assert not may_share_process(env, MyRunner)


def test_env_that_renders_for_a_person_may_wait() -> None:
    class Shown:
        render_mode = "human"

    Shown.__module__ = "gymnasium.envs"
    assert not may_share_process(Shown(), EnvRunner)


def test_anything_may_be_called_an_env() -> None:
    assert not may_share_process(object(), EnvRunner)
    ring: Any = type("Ring", (), {"__module__": "gymnasium.ring"})()
    ring.env = ring
    assert may_share_process(ring, EnvRunner)  # and that ends


def test_function_of_the_program_in_a_known_wrapper_may_keep_something_per_process() -> None:
    for function in (lambda reward: reward + 1, functools.partial(lambda much, reward: much * reward, 2)):
        wrapped = TransformReward(gymnasium.make("CartPole-v1"), function)
        assert not may_share_process(wrapped, EnvRunner)
        assert not may_share_process(TimeLimit(wrapped, 10), EnvRunner)
    known = TransformReward(gymnasium.make("CartPole-v1"), np.sign)
    assert may_share_process(known, EnvRunner)
