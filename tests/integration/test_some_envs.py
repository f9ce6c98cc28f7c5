"""Calls, attributes and reset options for some envs, questions about attributes, infos by env."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from hubs import serve

import envhub


class Scripted(gymnasium.Env[Any, Any]):
    """Counts what is done to it."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, number: int) -> None:
        self.number, self.calls, self.options = number, 0, None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.options = options
        return np.zeros(2, np.float32), {"options": str(options)}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), float(self.number), False, False, {"number": self.number}

    def count(self, by: int = 1) -> int:
        self.calls += by
        return self.calls

    @property
    def broken(self) -> int:
        raise ValueError("a property that raises")

    def sleep(self) -> int:
        time.sleep(60)
        return 0

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Named(TimeLimit):
    """A wrapper of this file."""


def wrapped(number: int) -> gymnasium.Env[Any, Any]:
    env = Scripted(number)
    return Named(env, 50) if number % 2 else env


@pytest.fixture(params=["auto", "wire"])
def envs(request: pytest.FixtureRequest) -> Iterator[envhub.HubVectorEnv]:
    factories = [partial(wrapped, number) for number in range(5)]
    with contextlib.closing(envhub.make_vec(factories, num_workers=2, lane=request.param)) as made:
        made.reset(seed=1)
        yield made


def test_call_of_some_touches_no_other(envs: envhub.HubVectorEnv) -> None:
    assert envs.call_some([3, 0], "count", by=2) == (2, 2)
    assert envs.call_some(np.array([4]), "count") == (1,)
    assert envs.get_attr("calls") == (2, 0, 0, 2, 1)
    assert envs.get_attr("number", [4, 1]) == (4, 1)
    envs.step(np.zeros(5, int))


@pytest.mark.long
@pytest.mark.parametrize("wrong", [[5], [-1], [1, 1], [], [0.5], "0"])
def test_numbers_of_no_envs_are_refused(envs: envhub.HubVectorEnv, wrong: Any) -> None:
    for call in (partial(envs.call_some, wrong, "count"), partial(envs.set_attr, "calls", 1, wrong)):
        with pytest.raises(ValueError, match="env_ids"):
            call()
    assert envs.get_attr("calls") == (0,) * 5


def test_attributes_of_some_are_set(envs: envhub.HubVectorEnv) -> None:
    envs.set_attr("note", "one", [2])
    envs.set_attr("note", ["of 4", "of 1"], [4, 1])
    assert envs.has_attr("note") == (False, True, True, False, True)
    assert envs.get_attr("note", [1, 4, 2]) == ("of 1", "of 4", "one")
    envs.set_attr("note", [["a", "list"]], [0])
    assert envs.get_attr("note", [0]) == (["a", "list"],)
    with pytest.raises(ValueError, match="Got `3` values for 2 environments"):
        envs.set_attr("note", [1, 2, 3], [0, 1])


def test_worker_that_is_not_asked_is_not_waited_for(envs: envhub.HubVectorEnv) -> None:
    with pytest.raises(envhub.WorkerDied):
        envs.call_some([0], "die")
    assert envs.call_some([1, 3], "count") == (1, 1)  # while the worker of env 0 starts again


def test_attribute_is_asked_for_without_being_called(envs: envhub.HubVectorEnv) -> None:
    assert envs.has_attr("sleep") == (True,) * 5
    assert envs.has_attr("missing", [3]) == (False,)
    assert envs.attr_is_callable("sleep", [1, 0]) == (True, True)
    with pytest.raises(ValueError, match="a property that raises"):
        envs.has_attr("broken")
    assert envs.has_attr("sleep") == (True,) * 5


def test_wrappers_are_compared_by_class(envs: envhub.HubVectorEnv) -> None:
    assert envs.is_wrapped(Named) == envs.is_wrapped(TimeLimit) == (False, True, False, True, False)
    assert envs.is_wrapped("gymnasium.core:Wrapper", [1, 0]) == (True, False)
    assert envs.is_wrapped(Scripted) == (False,) * 5  # the env is no wrapper
    for neither in ("TimeLimit", 3):
        with pytest.raises(TypeError, match="takes a class or its name, 'module:Class', got"):
            envs.is_wrapped(neither)  # type: ignore[arg-type]


def test_each_env_gets_its_own_options(envs: envhub.HubVectorEnv) -> None:
    given: list[Any] = [{"level": 0}, None, {"level": [2]}, {}, {"reset_mask": "its own"}]
    _, infos = envs.reset(seed=3, options=given)
    assert list(infos["options"]) == [str(options) for options in given]
    envs.info_mode = "by_env"
    _, by_env = envs.reset(seed=[1, 2, 3, 4, 5], options=[None] * 5)
    assert by_env == {row: {"options": "None"} for row in range(5)}
    with pytest.raises(ValueError, match="must match num_envs=5, got 2"):
        envs.reset(options=[None, {}])
    with pytest.raises(TypeError, match="the options of env 1 are a dict or None, got 7"):
        envs.reset(options=[None, 7, None, None, None])  # type: ignore[list-item]


def test_some_are_reset_with_the_options_as_they_are(envs: envhub.HubVectorEnv) -> None:
    envs.set_attr("options", "as before")
    envs.info_mode = "by_env"
    _, by_env = envs.reset(seed=[9, 8, 7, 6, 5], env_ids=[3, 0])
    assert by_env == {row: {"options": "None"} for row in (0, 3)}
    options = {"reset_mask": "its own"}
    _, by_env = envs.reset(options=options, env_ids=np.array([4]))
    assert by_env == {4: {"options": str(options)}}
    assert envs.get_attr("options") == (None, "as before", "as before", None, options)
    assert [envs.get_attr("np_random_seed", [row])[0] for row in (0, 3)] == [9, 6]
    with pytest.raises(ValueError, match="env_ids"):
        envs.reset(env_ids=[5])
    with pytest.raises(ValueError, match="not with env_ids"):
        envs.reset(options=[None] * 5, env_ids=[1])
    envs.step(np.zeros(5, int))


def test_parts_give_infos_by_env(envs: envhub.HubVectorEnv) -> None:
    envs.info_mode = "by_env"
    envs.async_reset(seed=1)
    *_, infos, env_ids = envs.recv()
    assert infos == {row: {"options": "None"} for row in range(5)} and len(env_ids) == 5
    envs.send(np.zeros(2, int), [4, 1])
    *_, infos, env_ids = envs.recv()
    assert infos == {1: {"number": 1}, 4: {"number": 4}} and env_ids.tolist() == [1, 4]


@pytest.mark.long
def test_network_client_asks_about_some(tmp_path: Any) -> None:
    with (
        serve(tmp_path, "CartPole-v1") as hub,
        contextlib.closing(envhub.make_vec("CartPole-v1", 3, hub=hub.tcp)) as envs,
    ):
        envs.reset(seed=1)
        envs.set_attr("gravity", 1.5, [2])
        assert envs.get_attr("gravity") == (9.8, 9.8, 1.5)
        assert envs.is_wrapped(TimeLimit) == (True,) * 3
        for ask in (envs.has_attr, partial(envs.call_some, [0])):
            with pytest.raises(envhub.RequestRefused, match="begins with an underscore"):
                ask("_elapsed_steps")
        for method, *values in (("get_wrapper_attr",), ("has_wrapper_attr",), ("set_wrapper_attr", 3)):
            with pytest.raises(ValueError, match="'_max_episode_steps' begins with an underscore"):
                envs.call(method, "_max_episode_steps", *values)
        assert envs.call("set_wrapper_attr", "kind", "_fast") == (True, True, True)  # a value may be any text
        assert envs.call("get_wrapper_attr", "gravity") == (9.8, 9.8, 1.5)
