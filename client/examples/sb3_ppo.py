"""PPO of Stable-Baselines3 on CartPole-v1, whose envs live in a hub.

pip install "envhub-rl[sb3]" && python sb3_ppo.py
"""

from __future__ import annotations

import argparse

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

from envhub.sb3 import HubVecEnv


def made(hub: str | None, num_envs: int, seed: int) -> VecEnv:
    """Envs of this program's own hub, or of the hub at an address, which makes them by their id."""
    if hub is None:
        return make_vec_env("CartPole-v1", num_envs, seed=seed, vec_env_cls=HubVecEnv)
    envs = HubVecEnv("CartPole-v1", num_envs, hub=hub)
    envs.seed(seed)
    return VecMonitor(envs)


def main() -> None:
    """Train, and print the mean return of 50 episodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hub", help="address of a hub; without it the program has its own")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    envs = made(arguments.hub, 8, arguments.seed)
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        seed=arguments.seed,
        device="cpu",
    )
    model.learn(arguments.steps)
    mean, _ = evaluate_policy(model, envs, n_eval_episodes=50)
    envs.close()
    print(f"mean return of 50 episodes: {mean:.1f}")


if __name__ == "__main__":
    main()
