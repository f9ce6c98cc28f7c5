"""DQN of Stable-Baselines3 on CartPole-v1, whose envs live in a hub.

pip install "envhub-rl[sb3]" && python sb3_dqn.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor

from envhub.sb3 import HubVecEnv


def main() -> None:
    """Train, and print the mean return of 50 episodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hub", help="address of a hub; without it the program has its own")
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    envs = HubVecEnv("CartPole-v1", 4, hub=arguments.hub)
    envs.seed(arguments.seed)
    monitored = VecMonitor(envs)
    test_envs = VecMonitor(HubVecEnv("CartPole-v1", 16, hub=arguments.hub))
    model = DQN(
        "MlpPolicy",
        monitored,
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1000,
        gamma=0.99,
        target_update_interval=10,
        train_freq=64,
        gradient_steps=128,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=arguments.seed,
        device="cpu",
    )
    with tempfile.TemporaryDirectory() as best:
        keep_best = EvalCallback(
            test_envs,
            callback_on_new_best=StopTrainingOnRewardThreshold(495, verbose=0),
            n_eval_episodes=32,
            eval_freq=500,
            best_model_save_path=best,
            verbose=0,
        )
        model.learn(arguments.steps, keep_best)
        model.set_parameters(f"{best}/best_model")
    mean, _ = evaluate_policy(model, test_envs, n_eval_episodes=50)
    monitored.close()
    test_envs.close()
    print(f"mean return of 50 episodes: {mean:.1f}")


if __name__ == "__main__":
    main()
