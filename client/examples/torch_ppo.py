"""Learn CartPole-v1 by PPO, with envs in a hub and nothing but PyTorch to learn with.

python client/examples/torch_ppo.py                          # a private hub starts and ends with the program
python client/examples/torch_ppo.py --hub tcp://simbox:5555  # a hub that `envhub serve` runs somewhere
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import envhub

NUM_ENVS, LENGTH, EPOCHS, MINIBATCH = 32, 32, 10, 256
GAMMA, LAMBDA, CLIP, LEARNING_RATE = 0.98, 0.8, 0.2, 1e-3


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def learn(envs: Any, steps: int, seed: int) -> nn.Module:
    """Learn for ``steps`` steps of envs, and return the policy, which gives the logits of an env's actions."""
    torch.manual_seed(seed)
    inputs, outputs = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    policy, critic = network(inputs, outputs), network(inputs, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], LEARNING_RATE)
    shape, observations = (LENGTH, envs.num_envs), torch.zeros((LENGTH + 1, *envs.observation_space.shape))
    actions, log_probs, rewards = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), torch.zeros(shape)
    terminated, ended, valid = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
    observations[-1] = torch.as_tensor(envs.reset(seed=seed)[0])
    for done in range(0, steps, LENGTH * envs.num_envs):
        optimizer.param_groups[0]["lr"] = (1 - done / steps) * LEARNING_RATE
        observations[0] = observations[-1]
        for t in range(LENGTH):
            with torch.no_grad():
                choice = Categorical(logits=policy(observations[t]))
            actions[t] = choice.sample()
            log_probs[t] = choice.log_prob(actions[t])
            *results, infos = envs.step(actions[t].numpy())
            observations[t + 1], rewards[t], terminated[t], ended[t] = map(torch.as_tensor, results)
            ended[t] |= terminated[t]  # and the next step ignores the action and resets
            valid[t] = ~(ended[t - 1] | torch.as_tensor(infos.get("_invalid_transition", False)))
        with torch.no_grad():
            values = critic(observations).squeeze(-1)
        errors = valid * (rewards + GAMMA * values[1:] * ~terminated - values[:-1])
        advantages, later = torch.zeros(shape), torch.zeros(envs.num_envs)
        for t in reversed(range(LENGTH)):
            advantages[t] = later = valid[t] * (errors[t] + GAMMA * LAMBDA * ~ended[t] * later)
        batch = observations[:-1][valid], actions[valid], log_probs[valid], advantages[valid], values[:-1][valid]
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(batch[0])).split(MINIBATCH):
                seen, taken, old_log_probs, advantage, old_values = (part[rows] for part in batch)
                ratio = (Categorical(logits=policy(seen)).log_prob(taken) - old_log_probs).exp()
                gain = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
                loss += 0.5 * (critic(seen).squeeze(-1) - (advantage + old_values)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
                optimizer.step()
    return policy


def mean_return(envs: Any, policy: nn.Module, episodes: int, seed: int) -> float:
    """The mean return of the most probable actions, over at least ``episodes`` whole episodes, as many of each env."""
    observations, _ = envs.reset(seed=seed)
    returns, resets = np.zeros(envs.num_envs), np.zeros(envs.num_envs, bool)
    episodes_per_env, done = -(-episodes // envs.num_envs), [[] for _ in returns]
    while min(map(len, done)) < episodes_per_env:
        chosen = policy(torch.as_tensor(observations)).argmax(-1)
        observations, rewards, terminations, truncations, infos = envs.step(chosen.numpy())
        returns = np.where(resets, 0, returns + rewards)
        resets = terminations | truncations
        for row in np.flatnonzero(resets & ~infos.get("_invalid_transition", np.False_)):
            done[row].append(returns[row])
    return float(np.mean([each[:episodes_per_env] for each in done]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole-v1 by PPO.")
    parser.add_argument("--hub", metavar="ADDRESS", help="a hub's address; by default a private hub")
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower with more
    envs = envhub.make_vec("CartPole-v1", NUM_ENVS, hub=arguments.hub, on_hub_loss="recreate")
    policy = learn(envs, arguments.steps, arguments.seed)
    print(f"mean return {mean_return(envs, policy, 50, arguments.seed + 10**6):.1f} of 50 episodes")
    envs.close()


if __name__ == "__main__":
    main()
