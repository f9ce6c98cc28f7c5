"""``envhub.make``: one env in a hub, as if it were here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import pytest
import sims

import envhub


@pytest.fixture
def env(address: str | None) -> Iterator[envhub.HubEnv]:
    made = envhub.make(sims.Counter) if address is None else envhub.make("counter", hub=address)
    with contextlib.closing(made):
        yield made


def test_asking_for_a_method_runs_nothing(env: envhub.HubEnv) -> None:
    assert env.has_wrapper_attr("reboot")
    assert callable(env.get_wrapper_attr("reboot"))
    assert env.get_wrapper_attr("reboots") == 0


def test_method_is_called_there_with_its_arguments(env: envhub.HubEnv) -> None:
    assert env.get_wrapper_attr("reboot")() == 1
    assert env.get_wrapper_attr("add")(2, right=3) == 5
    assert env.get_wrapper_attr("reboots") == 1
    with pytest.raises(TypeError, match="left"):
        env.get_wrapper_attr("add")()


def test_value_is_the_value(env: envhub.HubEnv) -> None:
    env.set_wrapper_attr("note", [1, "two"])
    assert env.has_wrapper_attr("note") and env.get_wrapper_attr("note") == [1, "two"]


def test_attribute_that_is_missing_is_no_attribute(env: envhub.HubEnv) -> None:
    assert not env.has_wrapper_attr("rebot")
    with pytest.raises(AttributeError, match="rebot"):
        env.get_wrapper_attr("rebot")


def test_attribute_that_cannot_be_carried_exists() -> None:
    class Holding(sims.Counter):
        def __init__(self) -> None:
            super().__init__()
            self.held = (one for one in "generator")

    with contextlib.closing(envhub.make(Holding)) as env:
        assert env.has_wrapper_attr("held")
        with pytest.raises(TypeError, match="generator"):
            env.get_wrapper_attr("held")


def test_wrapper_outside_finds_what_the_env_has(env: envhub.HubEnv) -> None:
    wrapped: gym.Env[Any, Any] = gym.Wrapper(env)
    assert wrapped.has_wrapper_attr("reboot") and wrapped.get_wrapper_attr("reboot")() == 1
    assert wrapped.set_wrapper_attr("note", "here") and env.get_wrapper_attr("note") == "here"


def test_attribute_that_nobody_has_is_set_only_by_force(env: envhub.HubEnv) -> None:
    assert not env.set_wrapper_attr("fresh", 1, force=False) and not env.has_wrapper_attr("fresh")
    wrapped: gym.Env[Any, Any] = gym.Wrapper(env)
    wrapped.set_wrapper_attr("fresh", 1)
    assert vars(wrapped)["fresh"] == 1 and not env.has_wrapper_attr("fresh")
    assert env.set_wrapper_attr("fresh", 2) and env.get_wrapper_attr("fresh") == 2
