"""Envs of every age of gym have Gymnasium's interface: their signatures and results say which age is theirs."""

from __future__ import annotations

import functools
import pickle
import sys
import types
from importlib import reload
from types import SimpleNamespace
from typing import Any

import gymnasium
import gymnasium as gym
import numpy as np
import pytest
from envhub_server.worker.gym_compat import adapt, make, pins
from envhub_server.worker.row import EnvRunner
from gymnasium import logger, spaces

from envhub.values import gym_api, pickling

SPACE = spaces.Box(0, 9, (1,), np.float32)


class OldEnv:
    """An env of gym 0.21 by its methods, without any base class, as whatever gym is installed may import it."""

    observation_space, action_space = SPACE, spaces.Discrete(2)
    metadata = {"render.modes": ["rgb_array"]}

    def __init__(self) -> None:
        self.seeds: list[Any] = []
        self.count = 0

    def seed(self, seed: Any = None) -> list[Any]:
        self.seeds.append(seed)
        return [seed]

    def reset(self) -> Any:
        self.count = 0
        return np.zeros(1, np.float32)

    def step(self, action: int) -> Any:
        self.count += 1
        ended = self.count == 2
        info = {"TimeLimit.truncated": True} if ended and action else {}
        return np.full(1, self.count, np.float32), 0.5, ended, info

    def render(self, mode: str = "human") -> Any:
        return mode


class Newer(OldEnv):
    """Results as of gym 0.26, and a reset that takes a seed but no options."""

    def reset(self, seed: Any = None) -> Any:  # type: ignore[override]
        self.seeds.append(seed)
        return super().reset(), {"count": 0}

    def step(self, action: int) -> Any:
        *found, info = super().step(action)
        return (*found, False, info)

    def render(self) -> Any:  # type: ignore[override]
        return "as it was made"


class Wrapper:
    """Passes on what it knows, as the wrappers of gym do."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self.env.step(action)


class JoypadSpace(Wrapper):
    """As that of nes_py 8: its reset takes nothing."""

    def reset(self) -> Any:  # type: ignore[override]
        return self.env.reset()


class TupleEnv(OldEnv):
    observation_space = spaces.Tuple([SPACE, spaces.Dict({"a": SPACE})])  # type: ignore[assignment]

    def reset(self) -> Any:
        return np.zeros(1, np.float32), {"a": np.zeros(1, np.float32)}


def runner(env: Any) -> EnvRunner:
    return EnvRunner(adapt(env))


@pytest.mark.parametrize("kind", [OldEnv, Newer])
@pytest.mark.parametrize("wrapper", [lambda env: env, Wrapper, JoypadSpace, lambda env: Wrapper(JoypadSpace(env))])
def test_env_of_any_age_is_seeded_reset_and_stepped_as_gymnasium_does(kind: Any, wrapper: Any) -> None:
    env = kind()
    run = runner(wrapper(env))
    observation, info = run.reset(7, None)
    assert observation == [0] and isinstance(info, dict) and 7 in env.seeds
    assert run.step(1)[1:] == (0.5, False, False, {})
    assert run.step(0)[2:4] == (True, False)
    assert run.autoreset()[0] == [0]
    run.step(1)
    assert run.step(1)[2:] == ((False, True, {}) if kind is OldEnv else (True, False, {"TimeLimit.truncated": True}))


def of_gym(name: str, module: str, **methods: Any) -> Any:
    """A class of this name and module of gym, without gym."""
    return type(name, (Wrapper,), {"__module__": module, **methods})


def test_env_older_than_gym_works_inside_the_wrappers_of_gym_026(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gym", SimpleNamespace(__version__="0.26.2", Wrapper=Wrapper))  # type: ignore[arg-type]
    wrapper = of_gym("Wrapper", "gym.core")

    class TimeLimit(wrapper):  # type: ignore[misc]
        __module__ = "gym.wrappers.time_limit"

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = self.env.step(action)
            return observation, reward, terminated, truncated, info

    for kind, outer in [(OldEnv, lambda env: env), (OldEnv, JoypadSpace), (Newer, wrapper)]:
        env = kind()
        run = runner(outer(TimeLimit(wrapper(env))))
        assert run.reset(7, None)[0] == [0] and 7 in env.seeds
        assert run.step(1)[1:] == (0.5, False, False, {})
        assert run.step(0)[2:4] == (True, False)


def test_options_reach_an_env_that_takes_them_only() -> None:
    class Taking(OldEnv):
        def reset(self, options: Any = None) -> Any:  # type: ignore[override]
            return np.full(1, 3 if options is None else options["at"], np.float32)

    assert runner(Taking()).reset(None, {"at": 5})[0] == [5]
    assert runner(Taking()).reset(None, None)[0] == [3]
    assert runner(OldEnv()).reset(None, {"at": 5})[0] == [0]


def test_env_that_takes_no_seed_is_reset_and_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unseeded(OldEnv):
        def seed(self) -> Any:  # type: ignore[override]
            raise AssertionError("it was not asked to draw a seed")

    warnings: list[str] = []
    monkeypatch.setattr(logger, "warn", lambda text, *rest: warnings.append(text))
    run = runner(Unseeded())
    run.reset(7, None)
    run.reset(8, None)
    assert len(warnings) == 1 and "takes no seed" in warnings[0]


def test_observation_of_two_parts_is_no_observation_with_an_info() -> None:
    observation, info = runner(TupleEnv()).reset(None, None)
    assert len(observation) == 2 and set(observation[1]) == {"a"} and info == {}


def test_render_asks_for_a_frame_where_it_takes_the_mode() -> None:
    assert adapt(Wrapper(OldEnv())).get_wrapper_attr("render")() == "rgb_array"
    assert adapt(Newer()).get_wrapper_attr("render")() == "as it was made"


def test_spaces_are_attributes_of_an_old_env_too() -> None:
    env = adapt(OldEnv())
    assert env.get_wrapper_attr("action_space") == spaces.Discrete(2)
    assert env.metadata == {"render_modes": ["rgb_array"]}


def test_step_of_another_number_of_values_is_refused() -> None:
    class Three(OldEnv):
        def step(self, action: int) -> Any:
            return np.zeros(1, np.float32), 0.0, False

    run = runner(Three())
    run.reset(None, None)
    with pytest.raises(TypeError, match="returned 3 values; gym has 4, and Gymnasium 5"):
        run.step(0)


@pytest.mark.parametrize(
    ("raised", "pin"),
    [
        (AttributeError("module 'numpy' has no attribute 'bool8'. Did you mean: 'bool'?"), "numpy<2"),
        (AttributeError("module 'numpy' has no attribute 'float'."), "numpy<1.24"),
        (ValueError("not enough values to unpack (expected 5, got 4)"), "gym==0.26.2"),
        (ValueError("too many values to unpack (expected 4)"), "gym<0.26"),
    ],
)
def test_error_of_another_version_says_what_to_install(
    raised: Exception, pin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raising(OldEnv):
        def step(self, action: int) -> Any:
            raise raised

    monkeypatch.setitem(__import__("sys").modules, "gym", gymnasium)
    assert pins(raised) == pin and pins(ValueError("of the env itself")) == ""
    run = runner(Raising())
    run.reset(None, None)
    with pytest.raises(type(raised), match=f"-m pip install '{pin}'"):
        run.step(0)


def test_arguments_that_are_none_are_left_out_where_an_env_does_not_take_them() -> None:
    class Env:
        def reset(self, seed: Any = "unset") -> Any:
            return seed, {}

    class Any_:
        def reset(self, **given: Any) -> Any:
            return sorted(given), {}

    class Around:
        def __init__(self, env: Any) -> None:
            self.env = env

        def reset(self, **given: Any) -> Any:
            return self.env.reset(**given)

    assert EnvRunner(Env()).reset(None, None) == (None, {})
    assert EnvRunner(Around(Env())).reset(None, None) == (None, {})
    for env in (Any_(), Around(Any_())):
        assert EnvRunner(env).reset(None, None) == (["options", "seed"], {})
    with pytest.raises(TypeError, match="options"):
        EnvRunner(Around(Env())).reset(None, {"a": 1})


def test_id_that_only_gym_knows_is_made_by_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    registration = SimpleNamespace(registry={"Old-v0": object(), "CartPole-v1": object()})
    gym = SimpleNamespace(
        __version__="0.26.2", make=lambda name: OldEnv(), envs=SimpleNamespace(registration=registration)
    )
    monkeypatch.setitem(sys.modules, "gym", gym)  # type: ignore[arg-type]
    assert make("sys:Old-v0", {}).unwrapped.seeds == []
    assert type(make("CartPole-v1", {}).unwrapped).__name__ == "CartPoleEnv"


# --- what is asked of either ------------------------------------------------------------------------------------------


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
    assert gym_api.why_not_env(Vec()).startswith("a vector env: pass vector=True")
