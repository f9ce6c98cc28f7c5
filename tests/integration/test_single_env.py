"""``envhub.make``: one env in a hub, as if it were here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sims
from gymnasium import spaces
from same import assert_same

import envhub


@pytest.fixture
def env(address: str | None) -> Iterator[envhub.HubEnv]:
    made = envhub.make(sims.Counter) if address is None else envhub.make("counter", hub=address)
    with contextlib.closing(made):
        yield made


def test_attribute_of_the_env_is_a_value_or_a_method_that_runs_when_it_is_called(env: envhub.HubEnv) -> None:
    assert env.has_wrapper_attr("reboot") and callable(env.get_wrapper_attr("reboot"))
    assert env.get_wrapper_attr("reboots") == 0
    assert env.get_wrapper_attr("reboot")() == 1
    assert env.get_wrapper_attr("add")(2, right=3) == 5
    assert env.get_wrapper_attr("reboots") == 1
    with pytest.raises(AttributeError, match="get_wrapper_attr"):
        env.unwrapped.reboots  # noqa: B018
    with pytest.raises(TypeError, match="left"):
        env.get_wrapper_attr("add")()
    env.set_wrapper_attr("note", [1, "two"])
    assert env.has_wrapper_attr("note") and env.get_wrapper_attr("note") == [1, "two"]
    gym.Wrapper(env).unwrapped.note = 3  # type: ignore[attr-defined]
    env.spec = None
    assert env.get_wrapper_attr("note") == 3 and "note" not in vars(env)
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


class Samples(gym.Env[Any, Any]):
    """Observes samples of a space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: gym.Space[Any]) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, False, False, {}


SCALAR, PAIR = spaces.Box(-1, 1, (), np.float32), spaces.Box(-1, 1, (2,), np.float64)


@pytest.mark.parametrize(
    "space",
    [
        SCALAR,
        PAIR,
        spaces.Discrete(5, start=2),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(3),
        spaces.Text(4, charset="a"),
        spaces.Sequence(SCALAR),
        spaces.Dict(b=SCALAR, a=spaces.Tuple([PAIR, spaces.Discrete(3)])),
        spaces.Tuple([SCALAR, spaces.Dict(a=PAIR, text=spaces.Text(3, charset="b"))]),
    ],
    ids=str,
)
def test_observations_are_of_the_kinds_that_the_env_gives(space: gym.Space[Any]) -> None:
    with contextlib.closing(envhub.make(lambda: Samples(space))) as found:
        wanted = Samples(space)
        assert_same(found.reset(seed=3)[0], wanted.reset(seed=3)[0], "reset")
        for _ in range(3):
            observation = found.step(0)[0]
            assert_same(observation, wanted.step(0)[0], "step")
            assert found.observation_space.contains(observation)
