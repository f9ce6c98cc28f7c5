"""Learn CartPole-v1 by RLlib's PPO, with each env runner's envs in a hub.

python client/examples/rllib_ppo.py                          # a private hub for each env runner
python client/examples/rllib_ppo.py --hub tcp://simbox:5555  # a hub that `envhub serve` runs somewhere
python client/examples/rllib_ppo.py --env-runners 2          # two processes of Ray's that sample
"""

from __future__ import annotations

import argparse

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

import envhub.rllib

NUM_ENVS = 32


def configure(hub: str | None, env_runners: int, steps: int, seed: int) -> PPOConfig:
    """PPO on CartPole-v1, whose learning rate falls to 0 within ``steps`` steps."""
    return (
        PPOConfig()
        .environment(envhub.rllib.register(), env_config={"env": "CartPole-v1", "hub": hub})
        .env_runners(
            num_env_runners=env_runners,
            num_envs_per_env_runner=NUM_ENVS // max(env_runners, 1),
            gym_env_vectorize_mode="vector_entry_point",
            create_env_on_local_worker=True,  # to evaluate with
        )
        .callbacks(envhub.rllib.CutEpisodes)
        .training(
            train_batch_size_per_learner=1024,
            minibatch_size=256,
            num_epochs=10,
            gamma=0.98,
            lambda_=0.8,
            clip_param=0.2,
            grad_clip=0.5,
            use_kl_loss=False,
            vf_loss_coeff=0.5,
            vf_clip_param=1e6,
            lr=[[0, 1e-3], [steps, 0.0]],
        )
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
        )
        .evaluation(evaluation_duration=50, evaluation_config={"explore": False})
        .debugging(seed=seed, log_level="ERROR")
    )


def learn(hub: str | None, env_runners: int, steps: int, seed: int) -> float:
    """Learn for ``steps`` steps of envs, and return the mean return of the last episodes that no crash cut short."""
    algorithm = configure(hub, env_runners, steps, seed).build_algo()
    try:
        while True:
            result = algorithm.train()["env_runners"]
            if result["num_env_steps_sampled_lifetime"] >= steps:
                break
        return float(algorithm.evaluate()["env_runners"]["whole_episode_return_mean"])
    finally:
        algorithm.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole-v1 by RLlib's PPO.")
    parser.add_argument("--hub", metavar="ADDRESS", help="a hub's address; by default private hubs")
    parser.add_argument("--env-runners", type=int, default=0, help="processes that sample; 0 is this one")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    ray.init(num_cpus=arguments.env_runners + 1, include_dashboard=False, log_to_driver=False)
    mean_return = learn(arguments.hub, arguments.env_runners, arguments.steps, arguments.seed)
    print(f"mean return {mean_return:.1f} of 50 episodes")


if __name__ == "__main__":
    main()
