"""Put a vector env with another interface behind Gymnasium's: here a ``VecEnv`` of Stable-Baselines3.

envhub serve other_vector_env:make --vector               # in this folder; or vector=True in a program
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv


class OtherVectorEnv(VectorEnv[Any, Any, Any]):
    """The envs of a ``VecEnv``, which resets an env in the step that ends its episode."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, other: Any) -> None:
        self.other, self.num_envs = other, other.num_envs
        self.single_observation_space, self.single_action_space = other.observation_space, other.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.other.seed(seed)
        return self.other.reset(), {}

    def step(self, actions: Any) -> Any:
        observations, rewards, dones, each = self.other.step(actions)
        infos: dict[str, Any] = {}
        for env, info in enumerate(each):
            final = {"final_obs": info["terminal_observation"]} if dones[env] else {}
            infos = self._add_info(infos, {**info, **final}, env)
        truncations = dones & [info.get("TimeLimit.truncated", False) for info in each]
        return observations, rewards, dones & ~truncations, truncations, infos

    def close_extras(self, **kwargs: Any) -> None:
        self.other.close()


def make(num_envs: int) -> OtherVectorEnv:
    import gymnasium as gym
    from stable_baselines3.common.vec_env import DummyVecEnv

    return OtherVectorEnv(DummyVecEnv([lambda: gym.make("CartPole-v1")] * num_envs))


def main() -> None:
    """Balance poles by the angle, and count the episodes."""
    import envhub

    envs = envhub.make_vec(make, 8, vector=True, autoreset_mode="SameStep")
    observations, _ = envs.reset(seed=42)
    ended = 0
    for _ in range(1000):
        observations, _, terminations, truncations, _ = envs.step((observations[:, 2] > 0).astype(np.int64))
        ended += int((terminations | truncations).sum())
    envs.close()
    print(f"{ended} episodes")


if __name__ == "__main__":
    main()
