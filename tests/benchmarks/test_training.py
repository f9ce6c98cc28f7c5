"""A trainer with only its import changed: A2C on LunarLander while torch has the CPUs, too.

``pytest -m benchmark -n 0 -s tests/benchmarks/test_training.py`` needs torch and ``gymnasium[box2d]``. The program is
of the kind of "Training A2C with vector envs" in Gymnasium's documentation: ten envs whose physics differ, 128 steps
for an update, two small networks. The ratio is printed with its target; it fails no test.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import envhub

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

NUM_ENVS, STEPS, UPDATES, TURNS = 10, 128, 4, 5
GAMMA, LAMBDA, ENTROPY = 0.999, 0.95, 0.01


def lander() -> gymnasium.Env[Any, Any]:
    chance = np.random.default_rng()
    return gymnasium.make(
        "LunarLander-v3",
        gravity=np.clip(chance.normal(-10.0, 1.0), -11.99, -0.01),
        enable_wind=bool(chance.integers(2)),
        wind_power=np.clip(chance.normal(15.0, 1.0), 0.01, 19.99),
        max_episode_steps=600,
    )


class A2C:
    """An agent with a critic and an actor, and the envs that it learns in."""

    def __init__(self, envs: Any) -> None:
        import torch
        from torch import nn

        self.torch = torch
        self.envs = RecordEpisodeStatistics(envs)
        inputs, actions = envs.single_observation_space.shape[0], envs.single_action_space.n
        self.critic = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.actor = nn.Sequential(
            nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, actions)
        )
        self.critic_optimizer = torch.optim.RMSprop(self.critic.parameters(), lr=0.005)
        self.actor_optimizer = torch.optim.RMSprop(self.actor.parameters(), lr=0.001)
        self.observations, _ = self.envs.reset(seed=42)

    def update(self) -> None:
        """Act for ``STEPS`` steps, and learn from them."""
        torch = self.torch
        values, rewards, log_probs, entropies, masks = [], [], [], [], []
        for _ in range(STEPS):
            observations = torch.as_tensor(self.observations)
            policy = torch.distributions.Categorical(logits=self.actor(observations))
            actions = policy.sample()
            self.observations, reward, terminated, truncated, _ = self.envs.step(actions.numpy())
            values.append(self.critic(observations).squeeze(-1))
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            log_probs.append(policy.log_prob(actions))
            entropies.append(policy.entropy())
            masks.append(torch.as_tensor(~(terminated | truncated), dtype=torch.float32))
        advantages, later = [], torch.zeros(NUM_ENVS)
        for step in reversed(range(STEPS - 1)):
            error = rewards[step] + GAMMA * masks[step] * values[step + 1].detach() - values[step]
            later = error + GAMMA * LAMBDA * masks[step] * later.detach()
            advantages.insert(0, later)
        advantage = torch.stack(advantages)
        critic_loss = advantage.pow(2).mean()
        actor_loss = (
            -(advantage.detach() * torch.stack(log_probs[:-1])).mean() - ENTROPY * torch.stack(entropies).mean()
        )
        for optimizer, loss in ((self.critic_optimizer, critic_loss), (self.actor_optimizer, actor_loss)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_a2c_trains_as_fast() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("Box2D")
    with contextlib.ExitStack() as stack:
        theirs = A2C(stack.enter_context(contextlib.closing(AsyncVectorEnv([lander] * NUM_ENVS))))
        envs = stack.enter_context(contextlib.closing(envhub.AsyncVectorEnv([lander] * NUM_ENVS)))
        ours = A2C(envs)
        taken_s: dict[A2C, list[float]] = {theirs: [], ours: []}
        for _ in range(TURNS):
            for agent, seconds in taken_s.items():
                begun_s = time.perf_counter()
                for _ in range(UPDATES):
                    agent.update()
                seconds.append(time.perf_counter() - begun_s)
    ratio = float(np.median(taken_s[theirs]) / np.median(taken_s[ours]))
    print(f"\nA2C: {ratio:.2f} times AsyncVectorEnv's speed (target >= 1.0); {envs.sizing}")
