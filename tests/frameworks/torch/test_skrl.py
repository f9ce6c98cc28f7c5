"""skrl's automatic wrapper around a vector env of a hub, beside the one around Gymnasium's."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hubs import kill_worker, serve, worker_processes
from skrl.envs.wrappers.torch import Wrapper, wrap_env
from skrl.envs.wrappers.torch.gymnasium_envs import GymnasiumWrapper
from skrl.utils import set_seed

import envhub

torch.set_num_threads(1)

NUM_ENVS, STEPS = 3, 200


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(tmp_path_factory.mktemp("hub"), "CartPole-v1", "Pendulum-v1") as hub:
        yield hub.tcp


@pytest.fixture(params=["private hub", "tcp"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"hub": request.getfixturevalue("tcp"), "lane": "wire"} if request.param == "tcp" else {}


def workers() -> set[int]:
    return {each.pid for each in worker_processes(os.getpid())}


def history(envs: Wrapper, steps: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Every tensor that skrl has of these steps."""
    envs.action_space.seed(1)
    yield (envs.reset()[0],)
    for _ in range(steps):
        sampled = [envs.action_space.sample() for _ in range(envs.num_envs)]
        actions = torch.as_tensor(np.array(sampled)).reshape(envs.num_envs, -1)
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        yield observations, rewards, terminated, truncated, envs.reset()[0]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_wrapper_is_found_and_shows_what_it_shows_of_gymnasiums_envs(
    name: str, mode: AutoresetMode, options: dict[str, Any]
) -> None:
    set_seed(7)
    ours = wrap_env(envhub.make_vec(name, NUM_ENVS, autoreset_mode=mode, **options))
    theirs = wrap_env(SyncVectorEnv([functools.partial(gymnasium.make, name)] * NUM_ENVS, autoreset_mode=mode))
    with contextlib.closing(ours), contextlib.closing(theirs):
        assert type(ours) is type(theirs) is GymnasiumWrapper
        assert (ours.num_envs, ours.num_agents, ours.device) == (theirs.num_envs, theirs.num_agents, theirs.device)
        assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
        ended = 0
        for number, (found, wanted) in enumerate(zip(history(ours, STEPS), history(theirs, STEPS), strict=True)):
            for our, their in zip(found, wanted, strict=True):
                assert our.dtype == their.dtype and our.shape == their.shape and torch.equal(our, their), number
            ended += int((found[2] | found[3]).sum()) if number else 0
        assert ended >= NUM_ENVS


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_infos_tell_of_an_episode_that_a_crash_cut_short(mode: str) -> None:
    others = workers()
    envs = wrap_env(envhub.make_vec("CartPole-v1", 2, num_workers=2, autoreset_mode=mode))
    with contextlib.closing(envs):
        actions = torch.zeros(2, 1, dtype=torch.long)
        before, _ = envs.reset()
        kill_worker(min(workers() - others))
        observations, rewards, terminated, truncated, infos = envs.step(actions)
        (row,) = np.flatnonzero(infos["invalid_transition"])
        assert truncated[row] and not terminated[row] and rewards[row] == 0
        assert torch.equal(observations[row], before[row])
        assert infos["env_failure"][row].signal == "SIGKILL" and not truncated[1 - row]
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        assert (observations[row].abs() <= 0.05).all() and rewards[row] == 0 and not (terminated | truncated)[row]
        _, rewards, _, _, infos = envs.step(actions)
        assert (rewards == 1).all() and "invalid_transition" not in infos
