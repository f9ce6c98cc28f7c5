"""Which envs may share a process, what they change there, and what later sessions know of them."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from envhub_server.catalog.registry import ENVS_MAX, ForkedImports, key
from envhub_server.ipc.control import SHARED
from envhub_server.worker.row import EnvRunner
from envhub_server.worker.shared_process import changed_since, may_share_process, shared_state
from gymnasium.wrappers import TimeLimit, TransformReward

from envhub.protocol.messages import Make


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


def test_each_change_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changes = [
        lambda: np.random.random(),
        lambda: random.random(),
        lambda: monkeypatch.setenv("ENVHUB_TEST_SHARED", "1"),
        lambda: monkeypatch.chdir(tmp_path),
    ]
    for name, change in zip(SHARED, changes, strict=True):
        state = shared_state()
        assert changed_since(state) == []
        change()
        assert changed_since(state) == [name]
    np.random.default_rng(3).random()
    random.Random(3).random()
    assert changed_since(shared_state()) == [] and os.getcwd() == str(tmp_path)


def test_program_may_have_another_generator() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        state = shared_state()
        assert changed_since(state) == []
        np.random.random()
        assert changed_since(state) == [SHARED[0]]
    finally:
        np.random.set_bit_generator(own)


def test_key_differs_between_envs_and_is_the_same_for_any_number_of_them() -> None:
    makes = [
        Make(4, "CartPole-v1"),
        Make(4, "CartPole-v0"),
        Make(4, "CartPole-v1", kwargs=b"k"),
        Make(4, "CartPole-v1", wrappers=["a:B"], wrapper_kwargs=[b""]),
        Make(4, "CartPole-v1", wrappers=["a:B"], wrapper_kwargs=[b"x"]),
        Make(4, factories=b"f", factories_digest="d"),
        Make(4, factories=b"f", factories_digest="e"),
    ]
    assert len({key(make) for make in makes}) == len(makes)
    assert key(Make(4, "CartPole-v1", seed := b"k")) == key(Make(64, "CartPole-v1", seed, num_workers=7))
    assert key(Make(4, factories=b"f", factories_digest="d")) == key(Make(4, factories=b"g", factories_digest="d"))


def test_last_making_counts_and_envs_that_were_made_longest_ago_make_room() -> None:
    imports, makes = ForkedImports(), [Make(1, f"A-v{number}") for number in range(ENVS_MAX + 2)]
    for make in makes:
        imports.learn(make, False)
    imports.learn(makes[-1], True)
    assert [imports.suits(makes[number]) for number in (0, 1, 2, -1)] == [True, True, False, True]


def test_env_that_cannot_be_told_from_others_is_not_remembered() -> None:
    imports = ForkedImports()
    for make in (Make(4, factories=b"f"), Make(4, "CartPole-v1", runner=b"r")):
        imports.learn(make, False)
        assert key(make) == "" and imports.suits(make)
