"""Snapshots beneath the frameworks: a reset goes back to one, with all that is around the envs."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecFrameStack, VecMonitor
from tensordict import TensorDictBase
from tianshou.algorithm.random import MARLRandomDiscreteMaskedOffPolicyAlgorithm
from tianshou.data import Collector as TianshouCollector
from tianshou.data import VectorReplayBuffer
from torchrl.collectors import Collector
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv

import envhub
from envhub.sb3 import HubVecEnv
from envhub.tianshou import HubVectorEnv as TianshouVectorEnv
from envhub.torchrl import make_env

torch.set_num_threads(1)

NUM_ENVS = 3
ACTIONS = np.random.default_rng(0).integers(2, size=(60, NUM_ENVS))


def steps(envs: Any) -> list[Any]:
    """The results of some steps, in which episodes end, without their infos."""
    return [[np.array(each) for each in envs.step(actions)[:-1]] for actions in ACTIONS]


def equal(some: list[Any], others: list[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(np.array_equal(left, right) for one, other in pairs for left, right in zip(one, other, strict=True))


def test_vec_env_of_sb3_is_reset_to_a_snapshot_with_all_its_wrappers() -> None:
    with closing(VecMonitor(VecFrameStack(HubVecEnv("CartPole-v1", NUM_ENVS, snapshots=True), 2))) as envs:
        envs.seed(1)
        envs.reset()
        before, *_ = envs.step(ACTIONS[0])
        snapshot = envs.envs.snapshot()
        following = steps(envs)
        assert any(dones.any() for *_, dones in following)
        for _ in range(2):
            envs.reset_to(snapshot)
            observations = envs.reset()
            assert not observations[:, :4].any() and (observations[:, 4:] == before[:, 4:]).all()
            assert equal([each[1:] for each in steps(envs)], [each[1:] for each in following])
        envs.reset_to(snapshot, source=1, reseed=7)
        observations = envs.reset()
        assert (observations[:, 4:] == before[1, 4:]).all()
        assert (envs.reset()[:, 4:] != before[1, 4:]).any()  # it was for one reset


def test_training_with_sb3_begins_at_the_snapshot() -> None:
    with closing(HubVecEnv("CartPole-v1", NUM_ENVS, snapshots=True)) as envs:
        model = PPO("MlpPolicy", envs, n_steps=8, batch_size=8, n_epochs=1, device="cpu")
        model.learn(24)
        snapshot, shown = envs.envs.snapshot(), envs.envs.observe().observations
        model.learn(24, reset_num_timesteps=False)
        assert (model.rollout_buffer.observations[::8] == shown).all()
        model.learn(24, reset_num_timesteps=False)
        assert (model.rollout_buffer.observations[::8] != shown).any()
        envs.reset_to(snapshot)
        model.learn(24)
        assert (model.rollout_buffer.observations[::8] == shown).all()


def test_vector_env_of_tianshou_is_reset_to_a_snapshot() -> None:
    with closing(TianshouVectorEnv("CartPole-v1", NUM_ENVS, snapshots=True)) as envs:
        envs.reset(seed=1)
        before, *_ = envs.step(ACTIONS[0])
        snapshot = envs.envs.snapshot()
        following = steps(envs)
        ended = np.flatnonzero(np.any([each[2] for each in following], 0))
        assert ended.size
        observations, infos = envs.reset(snapshot=snapshot)
        assert (observations == before).all() and len(infos) == NUM_ENVS
        assert equal(steps(envs), following)
        observations, _ = envs.reset([1, 2], snapshot=snapshot, source=0, reseed=3)
        assert (observations == before[0]).all()
        policy = MARLRandomDiscreteMaskedOffPolicyAlgorithm(action_space=envs.action_space[0]).policy
        collector = TianshouCollector(policy, envs, VectorReplayBuffer(300, NUM_ENVS))
        collector.reset(gym_reset_kwargs={"snapshot": snapshot})
        assert (collector._pre_collect_obs_RO == before).all()


def rolled_out(env: TransformedEnv, start: TensorDictBase) -> TensorDictBase:
    torch.manual_seed(5)
    return env.rollout(40, tensordict=start, auto_reset=False, break_when_any_done=False)


def test_env_of_torchrl_and_its_collector_are_reset_to_a_snapshot() -> None:
    base = make_env("CartPole-v1", NUM_ENVS, snapshots=True)
    env = TransformedEnv(base, Compose(StepCounter(), RewardSum()))
    env.set_seed(1)
    shown = env.rollout(4)[:, -1]["next", "observation"]
    snapshot = env.snapshot()
    following = rolled_out(env, env.reset(snapshot=snapshot))
    assert (following[:, 0]["observation"] == shown).all() and not following[:, 0]["step_count"].any()
    assert following["next", "done"].any()
    start = env.reset(snapshot=snapshot)
    assert (rolled_out(env, start) == following).all()
    branched = env.reset(snapshot=snapshot, source=2, reseed=3)
    assert (branched["observation"] == shown[2]).all()
    mask = torch.tensor([[True], [False], [False]])
    partly = env.reset(branched.set("_reset", mask), snapshot=snapshot)
    assert (partly["observation"] == torch.stack([shown[0], shown[2], shown[2]])).all()
    collector = Collector(env, None, frames_per_batch=6, total_frames=24)
    for number, batch in zip(range(3), collector, strict=False):
        begins_there = bool((batch[:, 0]["observation"] == shown).all())
        assert begins_there is (number > 0)
        collector.reset(snapshot=snapshot)
    collector.shutdown()


def test_older_infos_come_with_a_restore() -> None:
    with closing(
        envhub.legacy_infos(envhub.make_vec("CartPole-v1", 2, snapshots=True, autoreset_mode="SameStep"))
    ) as envs:
        shown, _ = envs.reset(seed=1)
        snapshot = envs.snapshot()
        envs.step(np.ones(2, int))
        observations, infos = envs.restore(snapshot)
        assert (observations == shown).all() and infos == {}
