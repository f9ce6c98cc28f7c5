"""Frameworks step envs over several hubs as they step those of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fleets import served_hubs
from hubs import ServedHub
from same import assert_same
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from envhub.sb3 import HubVecEnv
from envhub.torchrl import make_env

torch.set_num_threads(1)
NUM_ENVS = 4


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedHub]]:
    with served_hubs(tmp_path_factory, 2, ["CartPole-v1"]) as served:
        yield served


def test_sb3_trains_on_envs_of_two_hubs_as_on_its_own(hubs: list[ServedHub]) -> None:
    parameters: list[Any] = []
    several = HubVecEnv("CartPole-v1", num_envs=NUM_ENVS, hub=[hub.tcp for hub in hubs], split=[1, 3], num_workers=2)
    for envs in (make_vec_env("CartPole-v1", NUM_ENVS, vec_env_cls=DummyVecEnv), several):
        with contextlib.closing(envs):
            model = PPO("MlpPolicy", envs, n_steps=32, n_epochs=1, seed=3, device="cpu")
            model.learn(256)
            parameters.append([each.detach().numpy() for each in model.policy.parameters()])
    for left, right in zip(*parameters, strict=True):
        assert_same(right, left, "parameters")


def test_torchrl_rolls_out_envs_of_two_hubs_as_of_one(hubs: list[ServedHub]) -> None:
    rollouts = []
    for hub, split in ((hubs[0].tcp, {}), ([hub.tcp for hub in hubs], {"split": [2, 2]})):
        envs = make_env("CartPole-v1", NUM_ENVS, hub=hub, num_workers=2, **split)  # type: ignore[arg-type]
        envs.set_seed(7)
        torch.manual_seed(1)
        rollouts.append(envs.rollout(60, break_when_any_done=False))
        envs.close()
    for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")):
        assert torch.equal(rollouts[0][key], rollouts[1][key]), key
