"""Real environments over tcp for a thousand steps each, equal to ``SyncVectorEnv`` to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import pytest
import sims
from gymnasium import spaces, wrappers
from gymnasium.vector import SyncVectorEnv
from hubs import ServedHub, serve
from odd_sims import minigrid, told_in_words
from same import assert_same

import envhub
from envhub.values import spaces as wire

NUM_ENVS, STEPS = 3, 1000
MUJOCO = ["HalfCheetah-v5", "Hopper-v5", "Ant-v5", "Humanoid-v5"]  # the quickest first
TOYS = ["Blackjack-v1", "Taxi-v4", "FrozenLake-v1"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def real_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    offered = ["ALE/*", "mission=odd_sims:told_in_words", *MUJOCO, *TOYS, "anything=sims:anything"]
    with serve(tmp_path_factory.mktemp("real"), *offered) as served:
        yield served


def check(envs: Any, factory: Callable[[], gym.Env[Any, Any]]) -> None:
    wanted = SyncVectorEnv([factory] * NUM_ENVS)
    assert envs.observation_space == wanted.observation_space and envs.action_space == wanted.action_space
    wanted.action_space.seed(7)
    assert_same(envs.reset(seed=3), wanted.reset(seed=3), "reset")
    for number in range(STEPS):
        actions = wanted.action_space.sample()
        assert_same(envs.step(actions), wanted.step(actions), f"step {number}")
    envs.close()
    wanted.close()


@pytest.mark.parametrize(
    "name", [*MUJOCO[:2], *TOYS, *(pytest.param(name, marks=pytest.mark.chaos) for name in MUJOCO[2:])]
)
def test_env_is_the_same_for_a_thousand_steps(real_hub: ServedHub, name: str) -> None:
    kwargs = {"max_episode_steps": 150} if name in MUJOCO else {}
    check(
        envhub.make_vec(name, NUM_ENVS, hub=real_hub.tcp, num_workers=2, env_kwargs=kwargs),
        functools.partial(gym.make, name, **kwargs),
    )


def test_minigrid_with_its_mission_in_words_is_the_same(real_hub: ServedHub) -> None:
    check(envhub.make_vec("mission", NUM_ENVS, hub=real_hub.tcp), told_in_words)
    check(envhub.make_vec(minigrid, NUM_ENVS), minigrid)  # a private hub carries its own space, too


def breakout() -> gym.Env[Any, Any]:
    import ale_py

    gym.register_envs(ale_py)
    env = gym.make("ALE/Breakout-v5", frameskip=1)
    env = wrappers.GrayscaleObservation(wrappers.MaxAndSkipObservation(env, 4))
    return wrappers.ClipReward(wrappers.FrameStackObservation(env, 4), -1, 1)


def test_atari_with_its_usual_wrappers_in_the_workers_is_the_same(real_hub: ServedHub) -> None:
    spec = breakout().spec
    assert spec is not None
    check(envhub.make_vec(spec, NUM_ENVS, hub=real_hub.tcp, num_workers=3), breakout)


VARIABLE = {
    "graph": spaces.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(4)),
    "sequence": spaces.Sequence(spaces.Box(0, 9, (2,), int)),
    "stacked sequence": spaces.Dict({"seen": spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True)}),
}


@pytest.mark.parametrize("name", VARIABLE)
def test_observations_of_no_fixed_size_are_the_same(real_hub: ServedHub, name: str) -> None:
    space, actions = VARIABLE[name], spaces.MultiDiscrete([3, 2])
    kwargs: dict[str, Any] = {"infos": [{"number": 1}, {}], "length": 40}
    described = {"observation_space": wire.describe(space), "action_space": wire.describe(actions)}
    envs = envhub.make_vec("anything", NUM_ENVS, hub=real_hub.tcp, env_kwargs={**kwargs, **described})
    check(envs, functools.partial(sims.Anything, space, actions, **kwargs))
