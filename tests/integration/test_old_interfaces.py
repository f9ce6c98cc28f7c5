"""Envs of any age, and with spaces of their own, give on every lane what they give in a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import old_interfaces
import pytest
import sims
from combinations import each_value
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hubs import ServedHub, serve
from same import assert_same

import envhub

STEPS = 14
OFFERED = [f"{name}=old_interfaces:{name}" for name in ("Plain", "Newer")]
OFFERED += ["own_space=sims:own_space", "no_space=sims:no_space", "minigrid:MiniGrid-*"]
WAYS = ["private", "wire", "tcp"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), *OFFERED) as served:
        yield served


def made(way: str, hub: ServedHub, name: str, factory: Any, count: int) -> Any:
    if way == "private":
        return envhub.make_vec(factory, count)
    return envhub.make_vec(name, count, hub=hub.ipc if way == "wire" else hub.tcp, lane="wire")


def as_row(observation: np.ndarray, reward: float, ended: bool, late: bool = False) -> tuple[Any, ...]:
    return observation, np.float64(reward), np.bool_(ended and not late), np.bool_(ended and late)


def plain_loop(seed: int, actions: list[int]) -> list[Any]:
    """What the env gives directly, with a reset in the step after the end of an episode."""
    env, ended = old_interfaces.Plain(), False
    env.seed(seed)
    found: list[Any] = [env.reset()]
    for action in actions:
        if ended:
            found.append(as_row(env.reset(), 0.0, False))
            ended = False
            continue
        observation, reward, ended, info = env.step(action)
        late = info.get("TimeLimit.truncated", False)
        found.append(as_row(observation, reward, ended, late))
    return found


@pytest.mark.parametrize(("way", "kind"), each_value(WAYS, [old_interfaces.Plain, old_interfaces.Newer]))
def test_env_without_a_base_class_gives_what_a_plain_loop_gives(hub: ServedHub, way: str, kind: Any) -> None:
    actions = [int(action) for action in np.random.default_rng(5).integers(0, 4, STEPS)]
    envs = made(way, hub, kind.__name__, kind, 2)
    assert envs.single_action_space == spaces.Discrete(4)
    assert envs.single_observation_space == spaces.Box(-100, 100, (3,), np.float32)
    assert envs.get_attr("action_space") == (spaces.Discrete(4),) * 2
    assert envs.get_attr("extra") == ("of the env",) * 2
    found = [envs.reset(seed=[3, 4])[0], *(envs.step(np.array([action] * 2))[:4] for action in actions)]
    envs.close()
    for env, seed in enumerate((3, 4)):
        for number, wanted in enumerate(plain_loop(seed, actions)):
            got = found[number][env] if number == 0 else tuple(part[env] for part in found[number])
            assert_same(got, wanted, f"step {number} of env {env}")


@pytest.mark.parametrize("way", WAYS)
def test_env_with_a_space_of_its_own_is_served(hub: ServedHub, way: str) -> None:
    envs = made(way, hub, "own_space", sims.own_space, 3)
    direct = SyncVectorEnv([sims.own_space] * 3)
    foreign = way == "private"
    kinds = (sims.OwnSpace,) if foreign else (spaces.Text,)
    assert isinstance(envs.single_action_space, kinds) and isinstance(envs.single_observation_space["colour"], kinds)
    assert_same(envs.reset(seed=3), direct.reset(seed=3), "reset")
    for _ in range(5):
        actions = direct.action_space.sample()
        found, wanted = envs.step(actions), direct.step(actions)
        assert_same(found, wanted, "step")
    assert envs.single_observation_space.contains({"colour": "red", "size": np.int64(1)})
    envs.close()


def test_space_that_no_space_is_near_to_is_refused_on_the_network(hub: ServedHub) -> None:
    with pytest.raises(envhub.UnsupportedSpace, match=r"NoSpace has no form on the network.*private hub"):
        envhub.make_vec("no_space", 2, hub=hub.tcp)
