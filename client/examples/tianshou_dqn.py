"""DQN of tianshou on CartPole-v1, whose envs live in a hub.

pip install "envhub-rl[tianshou]" && python tianshou_dqn.py
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import numpy as np
import torch
from tianshou.algorithm import DQN
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net

from envhub.tianshou import HubVectorEnv, ValidReplayBuffer

NUM_ENVS, EPOCH_STEPS = 16, 4000


def main() -> None:
    """Train, and print the mean return of 50 episodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hub", help="address of a hub; without it the program has its own")
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    np.random.seed(arguments.seed)
    envs = HubVectorEnv("CartPole-v1", NUM_ENVS, hub=arguments.hub)
    test_envs = HubVectorEnv("CartPole-v1", NUM_ENVS, hub=arguments.hub)
    envs.seed(arguments.seed)
    test_envs.seed(arguments.seed + NUM_ENVS)

    action_space, observation_space = envs.action_space[0], envs.observation_space[0]
    model = Net(state_shape=observation_space.shape, action_shape=int(action_space.n), hidden_sizes=[128, 128])
    policy = DiscreteQLearningPolicy(
        model=model, action_space=action_space, observation_space=observation_space, eps_training=1.0
    )
    algorithm: Any = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=1e-3),
        gamma=0.99,
        n_step_return_horizon=10,
        target_update_freq=200,
    )
    buffer = ValidReplayBuffer(100_000, NUM_ENVS)
    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    test_collector = Collector(algorithm, test_envs)
    collector.reset()
    collector.collect(n_step=min(1024, arguments.steps), random=True)

    best = copy.deepcopy(policy.state_dict())

    def explore_less(_: int, env_step: int) -> None:
        policy.set_eps_training(max(0.04, 1 - env_step / (0.4 * arguments.steps)))

    def keep(algorithm: Any) -> None:
        best.update(copy.deepcopy(algorithm.policy.state_dict()))

    algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            test_collector=test_collector,
            max_epochs=max(1, arguments.steps // EPOCH_STEPS),
            epoch_num_steps=min(EPOCH_STEPS, arguments.steps),
            collection_step_num_env_steps=4 * NUM_ENVS,
            update_step_num_gradient_steps_per_sample=0.25,
            batch_size=128,
            test_step_num_episodes=2 * NUM_ENVS,
            training_fn=explore_less,
            stop_fn=lambda mean: mean >= 495,
            save_best_fn=keep,
        )
    )
    policy.load_state_dict(best)
    test_collector.reset()
    returns = test_collector.collect(n_episode=50).returns
    collector.close()
    test_collector.close()
    print(f"mean return of 50 episodes: {returns.mean():.1f}")


if __name__ == "__main__":
    main()
