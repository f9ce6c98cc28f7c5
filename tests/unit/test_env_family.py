"""Which envs are known to compute in their own process."""

from __future__ import annotations

from typing import Any

import ale_py
import gymnasium
import pytest
from envhub_server.worker.env_family import computes_in_process
from envhub_server.worker.env_runner import EnvRunner
from gymnasium.wrappers import TimeLimit


class Mine(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that may wait for whatever it likes."""


class MyRunner(EnvRunner):
    """Likewise."""


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "ALE/Pong-v5"])
def test_envs_of_gymnasium_and_ale_compute_in_their_process(name: str) -> None:
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(name)
    assert computes_in_process(env, EnvRunner)
    assert computes_in_process(TimeLimit(env, 10), EnvRunner)
    env.close()


def test_wrapper_or_runner_of_an_unknown_package_may_wait() -> None:
    env = gymnasium.make("CartPole-v1")
    assert not computes_in_process(Mine(env), EnvRunner)
    assert not computes_in_process(TimeLimit(Mine(env), 10), EnvRunner)
    assert not computes_in_process(env, MyRunner)


def test_env_of_a_program_may_wait() -> None:
    class Own(gymnasium.Env[Any, Any]):
        pass

    assert not computes_in_process(Own(), EnvRunner)


def test_env_that_renders_for_a_person_may_wait() -> None:
    class Shown:
        render_mode = "human"

    Shown.__module__ = "gymnasium.envs"
    assert not computes_in_process(Shown(), EnvRunner)


def test_anything_may_be_called_an_env() -> None:
    assert not computes_in_process(object(), EnvRunner)
    ring: Any = type("Ring", (), {"__module__": "gymnasium.ring"})()
    ring.env = ring
    assert computes_in_process(ring, EnvRunner)  # and that ends
