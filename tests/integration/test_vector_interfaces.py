"""Vector envs with other interfaces than Gymnasium's give through a hub what they give directly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import old_vector_sims
import pytest
from gymnasium import spaces
from hubs import ServedHub, serve
from same import assert_same

import envhub

NUM_ENVS, STEPS = 3, 12
WAYS = ["in_process", "private", "wire", "tcp"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    offered = [f"{name}=old_vector_sims:{name}" for name in ("VecEnv", "Gym3")]
    with serve(tmp_path_factory.mktemp("hub"), *offered, "--vector") as served:
        yield served


def made(way: str, hub: ServedHub, name: str, **options: Any) -> Any:
    options = {"autoreset_mode": "SameStep", **options}
    if way in ("wire", "tcp"):
        return envhub.make_vec(name, NUM_ENVS, hub=hub.ipc if way == "wire" else hub.tcp, lane="wire", **options)
    factory = getattr(old_vector_sims, name)
    return envhub.make_vec(factory, NUM_ENVS, vector=True, num_workers=0 if way == "in_process" else None, **options)


ACTIONS = np.random.default_rng(3).integers(0, 3, (STEPS, NUM_ENVS))


@pytest.mark.parametrize("way", WAYS)
def test_vec_env_of_stable_baselines_gives_what_it_gives_directly(hub: ServedHub, way: str) -> None:
    envs, direct = made(way, hub, "VecEnv"), old_vector_sims.VecEnv(NUM_ENVS)
    assert envs.single_action_space == spaces.Discrete(3) and envs.num_envs == NUM_ENVS
    direct.seed(5)
    assert_same(envs.reset(seed=5)[0], direct.reset(), "reset")
    ended = 0
    for actions in ACTIONS:
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        wanted, of_direct, dones, told = direct.step(actions)
        assert_same(observations, wanted, "observations")
        assert rewards.tolist() == of_direct.tolist() and infos["action"].tolist() == actions.tolist()
        assert (terminations | truncations).tolist() == dones.tolist()
        for env in np.flatnonzero(dones):
            ended += 1
            assert truncations[env] == (env == 1)
            assert_same(infos["final_obs"][env], told[env]["terminal_observation"], "final_obs")
    assert ended >= NUM_ENVS
    envs.close()


@pytest.mark.parametrize("way", WAYS)
def test_env_of_gym3_gives_what_it_gives_directly(hub: ServedHub, way: str) -> None:
    envs, direct = made(way, hub, "Gym3"), old_vector_sims.Gym3(NUM_ENVS)
    assert envs.single_observation_space == spaces.Dict({"rgb": spaces.Box(0, 255, (2, 3), np.uint8)})
    assert envs.single_action_space == spaces.Discrete(15)
    first = envs.reset()[0]
    assert_same(first, direct.observe()[1], "reset")
    for actions in ACTIONS:
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        direct.act(actions)
        of_direct, wanted, begun = direct.observe()
        assert_same(observations, wanted, "observations")
        assert rewards.tolist() == of_direct.tolist() and terminations.tolist() == begun.tolist()
        assert not truncations.any() and infos["level"].tolist() == [0, 1, 2]
    assert_same(envs.reset()[0], first, "it was made again")
    envs.close()


@pytest.mark.parametrize("name", ["VecEnv", "Gym3"])
def test_mode_that_it_has_not_and_vector_that_was_left_out_are_told_with_the_line_to_write(name: str) -> None:
    factory = getattr(old_vector_sims, name)
    with pytest.raises(ValueError, match="cannot be had of it: pass autoreset_mode='SameStep'"):
        envhub.make_vec(factory, NUM_ENVS, vector=True)
    with pytest.raises(TypeError, match="pass vector=True"):
        envhub.make_vec(lambda: factory(NUM_ENVS), NUM_ENVS)
