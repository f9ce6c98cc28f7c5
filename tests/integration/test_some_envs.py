"""Calls, attributes and reset options for some envs, questions about attributes, infos by env."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import odd_sims
import pytest
import sims
from gymnasium.wrappers import TimeLimit
from hubs import kill_worker, serve, worker_processes
from test_hub_loss import kill_private_hub

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


# --- attributes that are set again ------------------------------------------------------------------------------------


PATIENCE_S = 30.0


def test_env_that_is_made_again_has_the_attributes_of_the_one_before() -> None:
    with closing(envhub.make_vec([sims.Naughty] * 2, num_workers=2, on_exception="truncate")) as envs:
        envs.reset(seed=1)
        envs.set_attr("note", ["first", "second"])
        envs.set_attr("note", "third", env_ids=[1])
        for action in (1, 3):  # made again in its process, and in another
            assert envs.step([0, action])[3].tolist() == [False, True]
            envs.reset()
            assert envs.get_attr("note") == ("first", "third")


@pytest.mark.long
def test_attribute_that_cannot_be_set_again_is_logged_and_the_env_goes_on(tmp_path: Path) -> None:
    with serve(tmp_path, "late=odd_sims:Late") as hub, closing(envhub.make_vec("late", 1, hub=hub.ipc)) as envs:
        envs.reset()
        envs.step([0])
        envs.set_attr("level", 3)
        envs.set_attr("note", "kept")
        kill_worker(int(envs.step([0])[0][0, 1]))
        envs.reset()
        assert envs.get_attr("note") == ("kept",) and envs.get_attr("level") == (0,)
        assert "the attribute 'level' cannot be set again: builtins.RuntimeError: not stepped yet" in hub.log


def test_recycled_env_keeps_its_attributes() -> None:
    with closing(envhub.make_vec([sims.Leaky] * 2, num_workers=2, recycle={"episodes": 2})) as envs:
        envs.reset(seed=1)
        envs.set_attr("note", ["first", "second"])
        before, end_s = set(envs.call("pid")), time.monotonic() + PATIENCE_S
        while before & set(envs.call("pid")) and time.monotonic() < end_s:
            assert not envs.step([0, 0])[3].any()
        assert not before & set(envs.call("pid"))
        assert envs.get_attr("note") == ("first", "second")


@pytest.mark.long
def test_envs_on_the_hub_that_follows_have_the_attributes_of_those_before(caplog: pytest.LogCaptureFixture) -> None:
    with closing(envhub.make_vec([odd_sims.Late] * 2, on_hub_loss="recreate")) as envs:
        envs.reset()
        envs.step([0, 0])
        envs.set_attr("note", ["first", "second"])
        envs.set_attr("level", 3)
        envs.set_attr("note", "third", env_ids=[1])
        kill_private_hub()
        envs.reset()
        assert envs.get_attr("note") == ("first", "third") and envs.get_attr("level") == (0, 0)
        assert "the attribute 'level' cannot be set again: not stepped yet" in caplog.text


@pytest.mark.long
def test_exception_of_a_signal_handler_while_attributes_are_set_again_reaches_the_program() -> None:
    class Interrupted(Exception):
        pass

    def handle(*_: object) -> None:
        if armed:
            raise Interrupted

    armed = False
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with closing(envhub.make_vec([odd_sims.Signalling], on_hub_loss="recreate")) as envs:
            envs.reset(seed=1)
            envs.set_attr("program", os.getpid())
            kill_private_hub()
            armed = True
            with pytest.raises(Interrupted):
                envs.reset(seed=1)
            armed = False
            assert envs.reset(seed=1)[0].shape == (1, 2)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_native_vector_env_keeps_its_attributes() -> None:
    with closing(envhub.make_vec("CartPole-v1", 2, vector=True)) as envs:
        envs.reset(seed=1)
        envs.set_attr("gravity", 1.6)
        (worker,) = worker_processes(os.getpid())
        kill_worker(worker.pid)
        envs.reset()
        assert envs.get_attr("gravity") == (1.6, 1.6)
