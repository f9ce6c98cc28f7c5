"""PPO of TorchRL on CartPole-v1, whose envs live in a hub.

pip install "envhub-rl[torchrl]" && python torchrl_ppo.py
"""

from __future__ import annotations

import argparse

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, ExplorationType, RewardSum, TransformedEnv, set_exploration_type
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from envhub.torchrl import make_env

NUM_ENVS, LENGTH, EPOCHS, MINIBATCH, LEARNING_RATE = 32, 32, 10, 256, 1e-3


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def cartpoles(hub: str | None, seed: int) -> EnvBase:
    envs = make_env("CartPole-v1", NUM_ENVS, hub=hub, categorical_action_encoding=True)
    envs.set_seed(seed)
    return TransformedEnv(envs, RewardSum())


def learn(env: EnvBase, steps: int) -> ProbabilisticActor:
    """Learn for ``steps`` steps of envs, which are closed then, and return the policy."""
    logits = TensorDictModule(network(2), in_keys=["observation"], out_keys=["logits"])
    policy = ProbabilisticActor(
        logits, in_keys=["logits"], spec=env.action_spec, distribution_class=Categorical, return_log_prob=True
    )
    critic = ValueOperator(network(1), in_keys=["observation"])
    advantages = GAE(gamma=0.98, lmbda=0.8, value_network=critic)
    loss = ClipPPOLoss(policy, critic, clip_epsilon=0.2, entropy_coeff=0.0, critic_coeff=0.5, loss_critic_type="l2")
    loss.set_keys(sample_log_prob="action_log_prob")
    loss.normalize_advantage = True
    optimizer = torch.optim.Adam(loss.parameters(), LEARNING_RATE)
    frames = {"frames_per_batch": NUM_ENVS * LENGTH, "total_frames": steps}
    collector = Collector(env, policy, **frames, auto_register_policy_transforms=False)
    for number, batch in enumerate(collector):
        optimizer.param_groups[0]["lr"] = (1 - number * batch.numel() / steps) * LEARNING_RATE
        with torch.no_grad():
            advantages(batch)
        # What the end of a worker cut short is no transition of an env's.
        samples = batch[~batch["next", "invalid_transition"].squeeze(-1)]
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(samples)).split(MINIBATCH):
                losses = loss(samples[rows])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
    return policy


def mean_return(env: EnvBase, policy: ProbabilisticActor, episodes: int) -> float:
    """The mean return of the most probable actions, over the first episodes of each env."""
    episodes_per_env = -(-episodes // NUM_ENVS)
    with torch.no_grad(), set_exploration_type(ExplorationType.MODE):
        data = env.rollout(500 * episodes_per_env, policy, break_when_any_done=False)
    whole = (data["next", "done"] & ~data["next", "invalid_transition"]).squeeze(-1)
    first = whole & (whole.cumsum(1) <= episodes_per_env)
    return float(data["next", "episode_reward"][first].mean())


def main() -> None:
    """Train, and print the mean return of 50 episodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hub", help="address of a hub; without it the program has its own")
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    policy = learn(cartpoles(arguments.hub, arguments.seed), arguments.steps)
    env = cartpoles(arguments.hub, arguments.seed + 10**6)
    print(f"mean return of 50 episodes: {mean_return(env, policy, 50):.1f}")
    env.close()


if __name__ == "__main__":
    main()
