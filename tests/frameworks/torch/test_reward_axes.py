"""Rewards with axes: tianshou, TorchRL and skrl take them, and Stable-Baselines3 gets none."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from large_sims import Goals
from same import assert_same
from skrl.envs.wrappers.torch import wrap_env
from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from torchrl.envs.utils import check_env_specs

from envhub import make_vec
from envhub.sb3 import HubVecEnv
from envhub.tianshou import HubVectorEnv
from envhub.torchrl import make_env

torch.set_num_threads(1)

NUM_ENVS = 3
FACTORY = partial(Goals, declared=True)
LANES = pytest.mark.parametrize("lane", ["auto", "wire"])


class Still(Policy):
    def forward(self, batch: Any, state: Any = None, **_: Any) -> Any:
        return Batch(act=np.zeros(len(batch), np.int64))


@LANES
def test_tianshous_buffer_holds_them_as_of_its_own_vector_env(lane: str) -> None:
    rewards = []
    for make in (partial(HubVectorEnv, lane=lane), DummyVectorEnv):
        with contextlib.closing(make([FACTORY] * NUM_ENVS)) as envs:
            buffer = VectorReplayBuffer(60, NUM_ENVS)
            collector = Collector(Still(envs.action_space[0]), envs, buffer)
            collector.reset()
            collector.collect(n_step=12)
            rewards.append(buffer.rew[buffer.sample_indices(0)])
    assert rewards[0].shape == (12, 2)
    assert_same(rewards[0], rewards[1].astype(np.float64), "rewards")


@LANES
def test_torchrls_spec_and_data_have_them(lane: str) -> None:
    with contextlib.closing(make_env([FACTORY] * NUM_ENVS, lane=lane)) as env:
        check_env_specs(env)
        assert env.reward_spec.shape == (NUM_ENVS, 2)
        found = env.rollout(6, break_when_any_done=False)["next", "reward"]
        assert found.shape == (NUM_ENVS, 6, 2)
        assert found[0].tolist() == [[count, count + 0.25] for count in (1.0, 2.0, 3.0)] * 2


def test_torchrl_names_the_reward_space_that_is_missing() -> None:
    refused = pytest.raises(ValueError, match=r"give the env a reward_space of shape \(2,\)")
    with contextlib.closing(make_env([Goals] * NUM_ENVS)) as env, refused:
        env.rollout(2)


@LANES
def test_skrl_shows_them_in_columns(lane: str) -> None:
    with contextlib.closing(wrap_env(make_vec([FACTORY] * NUM_ENVS, lane=lane))) as envs:
        envs.reset()
        rewards = envs.step(torch.zeros(NUM_ENVS, 1, dtype=torch.int64))[1]
        assert rewards.dtype == torch.float32 and rewards.tolist() == [[1.0, 1.25]] * NUM_ENVS


@pytest.mark.parametrize("declared", [True, False])
def test_sb3_is_given_none(declared: bool) -> None:
    def step() -> None:
        with contextlib.closing(HubVecEnv([partial(Goals, declared=declared)] * NUM_ENVS)) as envs:
            assert not declared
            envs.reset()
            envs.step(np.zeros(NUM_ENVS, np.int64))

    with pytest.raises(ValueError, match=r"rewards of shape \(2,\), and for Stable-Baselines3 a reward is one number"):
        step()
