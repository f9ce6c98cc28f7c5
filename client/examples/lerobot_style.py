"""Imitate an expert from images and states, and evaluate the policy, the way LeRobot uses environments.

    python client/examples/lerobot_style.py                          # a private hub starts and ends with the program
    python client/examples/lerobot_style.py --hub tcp://simbox:5555  # of `envhub serve gym_reach:gym_reach/Reach-v0`

``gym_reach`` stands for a package such as ``gym_pusht``: a hub's workers import it, and this program does not.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch import nn

import envhub

NUM_ENVS = 16
TASK = "gym_reach:gym_reach/Reach-v0"


class Policy(nn.Module):
    """Choose an action by the bright part of the image and the agent's place."""

    grid: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 4, 3, padding=1)
        self.move = nn.Sequential(nn.Linear(2 * 4 + 2, 64), nn.ReLU(), nn.Linear(64, 2), nn.Tanh())
        self.register_buffer("grid", torch.stack(torch.meshgrid(*[torch.linspace(0, 1, size)] * 2, indexing="ij"), -1))

    def forward(self, observation: dict[str, Any]) -> torch.Tensor:
        pixels = torch.as_tensor(observation["pixels"]).permute(0, 3, 1, 2) / 25.0
        places = self.look(pixels).flatten(2).softmax(-1) @ self.grid.flatten(0, 1)
        return 0.1 * self.move(torch.cat([places.flatten(1), torch.as_tensor(observation["agent_pos"])], 1))


def imitate(envs: Any, steps: int, seed: int) -> Policy:
    """Learn to act as the expert does, which the envs' infos tell, in states on and next to its path."""
    torch.manual_seed(seed)
    policy = Policy(envs.single_observation_space["pixels"].shape[0])
    noise = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    observations, infos = envs.reset(seed=seed)
    for _ in range(steps // envs.num_envs):
        expert = np.stack(infos["expert"])
        loss = 100 * (policy(observations) - torch.as_tensor(expert)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        actions = expert + noise.normal(0, 0.1, expert.shape).astype(np.float32)
        observations, _, _, _, infos = envs.step(actions)
    return policy


def evaluate(envs: Any, policy: Policy, episodes: int, seed: int) -> tuple[float, float]:
    """The mean return of at least ``episodes`` episodes, and the share of them that succeeded."""
    observations, _ = envs.reset(seed=seed)
    returns, done, successes = np.zeros(envs.num_envs), [], []
    while len(done) < episodes:
        with torch.no_grad():
            actions = policy(observations).numpy()
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        returns += rewards
        ended = terminations | truncations
        if "is_success" in infos.get("final_info", {}):  # an episode that a crash cut short has none
            whole = infos["final_info"]["_is_success"]
            successes += infos["final_info"]["is_success"][whole].tolist()
            done += returns[whole].tolist()
        returns[ended] = 0
    return float(np.mean(done)), float(np.mean(successes))


def main() -> None:
    parser = argparse.ArgumentParser(description="Imitate an expert from images and states.")
    parser.add_argument("--hub", metavar="ADDRESS", help="a hub's address; by default a private hub")
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    envs = envhub.make_vec(TASK, NUM_ENVS, hub=arguments.hub, autoreset_mode="SameStep")
    policy = imitate(envs, arguments.steps, arguments.seed)
    mean_return, success = evaluate(envs, policy, 50, arguments.seed + 10**6)
    print(f"mean return {mean_return:.2f}, success {success:.0%} of 50 episodes")
    envs.close()


if __name__ == "__main__":
    main()
