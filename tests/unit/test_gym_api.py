"""What the worker and the hub ask of Gymnasium, or of its ancestor."""

from __future__ import annotations

import functools
import pickle
import sys
import types
from importlib import reload
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import spaces

from envhub.values import gym_api, pickling


def test_gym_stands_for_gymnasium_where_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    ancestor = types.ModuleType("gym")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "gymnasium", None)
        without.setitem(sys.modules, "gym", ancestor)
        assert reload(gym_api).api is ancestor
    assert reload(gym_api).api is gym


def test_ids_are_those_of_both_registries() -> None:
    newer = SimpleNamespace(envs=SimpleNamespace(registration=SimpleNamespace(registry={"B-v0": 1, "A-v0": 2})))
    entries = SimpleNamespace(env_specs={"Old-v0": 1})
    older = SimpleNamespace(envs=SimpleNamespace(registration=SimpleNamespace(registry=entries)))
    assert gym_api.registered(newer) == ["A-v0", "B-v0"] and gym_api.registered(older) == ["Old-v0"]


class Turns:
    """An AEC env of PettingZoo, as far as it is looked at."""

    def observation_space(self, agent: str) -> None: ...

    def agent_iter(self) -> None: ...


class NoSpace:
    observation_space, action_space = spaces.Discrete(2), "left or right"

    def reset(self) -> None: ...

    def step(self, action: Any) -> None: ...


@pytest.mark.parametrize(
    "made, text",
    [
        (Turns(), "whose agents take turns"),
        (NoSpace(), "whose action_space is 'left or right' and no space"),
        (NoSpace, "the class NoSpace in place of an env"),
        (3, "no env: it has no `observation_space`"),
    ],
)
def test_what_is_no_env_is_described(made: Any, text: str) -> None:
    assert text in gym_api.unfit(made)


def test_entry_of_the_registry_is_pickled_with_its_functions_apart() -> None:
    arm = functools.partial(dict, joints=3)
    plain, callables = pickle.loads(gym_api.pickled(SimpleNamespace(id="Arm-v0", entry_point=arm)))
    assert (
        plain.id == "Arm-v0" and plain.entry_point is None and pickle.loads(callables["entry_point"])() == {"joints": 3}
    )
    named = SimpleNamespace(id="Arm-v0", entry_point="arms:Arm")
    assert pickle.loads(gym_api.pickled(named)) == (named, {})
    assert pickling.dumps(arm)


class Vec:
    """An object with the parts of a ``VecEnv``."""

    num_envs, observation_space, action_space = 2, spaces.Discrete(2), spaces.Discrete(2)

    def step_async(self) -> None: ...


def test_vector_env_of_another_library_is_told_by_its_parts() -> None:
    assert gym_api.unfit(Vec()).startswith("a vector env: pass vector=True")
