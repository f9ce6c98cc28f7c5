"""Factories with arguments and by name, wrappers by name, and the interpreter and rendering of a private hub."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import sims
from envhub_client.keywords import named_wrappers
from gymnasium import wrappers
from gymnasium.vector import SyncVectorEnv
from hubs import ServedHub
from interpreters import WORKING, environment
from same import assert_same

import envhub

WAYS: list[dict[str, Any]] = [{}, {"lane": "wire"}]


def lengths(envs: Any) -> list[int]:
    with_length: list[int] = list(envs.get_attr("length"))
    envs.close()
    return with_length


@pytest.mark.parametrize("way", WAYS)
def test_arguments_are_passed_to_a_factory(way: dict[str, Any]) -> None:
    assert lengths(envhub.make_vec(sims.Counter, 2, length=7, **way)) == [7, 7]
    assert lengths(envhub.make_vec([sims.Counter] * 2, length=7, **way)) == [7, 7]
    each = [{"length": 3}, {"length": 4}]
    assert lengths(envhub.make_vec(sims.Counter, length=7, env_kwargs=each, **way)) == [3, 4]
    assert lengths(envhub.make_vec([sims.Counter] * 2, env_kwargs=each, **way)) == [3, 4]


def test_argument_that_a_factory_does_not_take_is_refused_before_a_worker_starts() -> None:
    with pytest.raises(TypeError, match=r"neither make_vec nor the factory takes 'lenght'$"):
        envhub.make_vec(sims.Counter, 2, lenght=7)


@pytest.mark.parametrize("way", WAYS)
def test_factory_may_be_named_as_for_serve(way: dict[str, Any]) -> None:
    assert lengths(envhub.make_vec("sims:Counter", 2, length=7, **way)) == [7, 7]
    env = envhub.make("sims:Counter", env_kwargs={"length": 9}, **way)
    assert env.get_wrapper_attr("length") == 9
    env.close()


def test_named_factory_that_does_not_exist_is_refused_by_its_name(hub: ServedHub) -> None:
    with pytest.raises(AttributeError, match="no_such_factory"):
        envhub.make_vec("sims:no_such_factory", 2)
    with pytest.raises(envhub.EnvHubError, match="does not offer 'sims:Counter'"):
        envhub.make_vec("sims:Counter", 2, hub=hub.tcp)


def test_id_without_a_version_is_no_factory() -> None:
    gymnasium.register("Unversioned", sims.Counter)
    try:
        assert lengths(envhub.make_vec("sims:Unversioned", 2, length=5)) == [5, 5]
    finally:
        gymnasium.registry.pop("Unversioned")


def wrapped() -> Any:
    env = wrappers.TimeLimit(gymnasium.make("CartPole-v1"), 5)
    return wrappers.FrameStackObservation(env, stack_size=3)


@pytest.mark.parametrize("way", ["private", "ipc", "tcp"])
def test_wrappers_are_named_with_their_arguments(hub: ServedHub, way: str) -> None:
    where: dict[str, Any] = {"ipc": {"hub": hub.ipc}, "tcp": {"hub": hub.tcp}}.get(way, {})
    named = [functools.partial(wrappers.TimeLimit, max_episode_steps=5), ("FrameStackObservation", {"stack_size": 3})]
    envs = envhub.make_vec("CartPole-v1", 2, wrappers=named, **where)
    direct = SyncVectorEnv([wrapped] * 2)
    assert envs.single_observation_space == direct.single_observation_space
    assert_same(envs.reset(seed=3), direct.reset(seed=3), "reset")
    for _ in range(8):
        actions = np.array([0, 1])
        found, wanted = envs.step(actions), direct.step(actions)
        assert_same(found, wanted, "step")
    assert envs.is_wrapped(wrappers.TimeLimit) == (True, True)
    envs.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("TimeLimit", "must be a list, such as"),
        ([lambda env: env], "is no wrapper that can be named"),
        (["NoSuchWrapper"], "is no wrapper that can be named"),
        ([functools.partial(wrappers.TimeLimit, None)], "must have names"),
        ([type("Local", (gymnasium.Wrapper,), {"__module__": "__main__"})], "cannot import the wrapper Local"),
    ],
)
def test_wrapper_that_cannot_be_named_is_refused(given: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        envhub.make_vec("CartPole-v1", 2, wrappers=given)


def test_arguments_of_wrappers_are_not_written_out_unless_they_are_refused() -> None:
    class Unprintable:
        def __repr__(self) -> str:
            raise RuntimeError("no text yet")

    entries, arguments = named_wrappers([("TimeLimit", {"max_episode_steps": Unprintable()})])
    assert entries == ["gymnasium.wrappers.common:TimeLimit"] and [*arguments[0]] == ["max_episode_steps"]


def test_wrappers_that_a_hub_does_not_make_are_refused_with_those_that_it_makes(hub: ServedHub) -> None:
    with pytest.raises(envhub.EnvHubError, match=r"RecordVideo.*makes no wrappers but .*TimeLimit"):
        envhub.make_vec("CartPole-v1", 2, hub=hub.tcp, wrappers=[("RecordVideo", {"video_folder": "x"})])
    with pytest.raises(TypeError, match="wrap in the factory"):
        envhub.make_vec(sims.Counter, 2, wrappers=["TimeLimit"])


def test_workers_of_a_private_hub_have_the_interpreter_that_is_asked_for(tmp_path: Path) -> None:
    folder = environment(tmp_path / "other", *WORKING, other_sim=OTHER_SIM)
    envs = envhub.make_vec("other_sim:make", 2, python=folder, length=3)
    assert envs.get_attr("prefix") == (str(folder),) * 2 and str(folder) != sys.prefix
    observations, _ = envs.reset(seed=1)
    assert observations.shape == (2, 4)
    envs.close()


OTHER_SIM = """
import sys
import gymnasium

class Named(gymnasium.Wrapper):
    prefix = sys.prefix

def make(length):
    return Named(gymnasium.make("CartPole-v1", max_episode_steps=length))
"""


@pytest.mark.long
def test_rendering_of_a_private_hub_is_the_workers_variable() -> None:
    envs = envhub.make_vec("sims:Counter", 1, rendering="osmesa")
    assert envs.call("environment", "MUJOCO_GL") == ("osmesa",)
    envs.close()
    envs = envhub.make_vec(sims.Counter, 1, rendering="egl")
    assert envs.call("environment", "PYOPENGL_PLATFORM") == ("egl",)
    envs.close()


def test_interpreter_and_rendering_are_for_private_hubs(hub: ServedHub) -> None:
    for option in ({"python": sys.prefix}, {"rendering": "egl"}):
        with pytest.raises(envhub.RequestRefused, match="for private hubs"):
            envhub.make_vec("CartPole-v1", 2, hub=hub.tcp, **option)
    with pytest.raises(ValueError, match="rendering must be 'egl' or 'osmesa'"):
        envhub.make_vec("CartPole-v1", 2, rendering="glfw")
