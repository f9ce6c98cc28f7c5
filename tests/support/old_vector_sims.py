"""Vector envs with the interfaces of baselines and Stable-Baselines3, and of gym3, without these packages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import spaces

LENGTH = 4


class Batch:
    """Envs that observe what their seeds draw, whose episodes take some steps, each another number."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.counts = np.zeros(num_envs, int)
        self.random = [np.random.RandomState(env) for env in range(num_envs)]

    def drawn(self, env: int) -> np.ndarray:
        return self.random[env].uniform(size=2).astype(np.float32)

    def advanced(self, env: int) -> bool:
        self.counts[env] += 1
        ended = self.counts[env] == LENGTH + env
        self.counts[env] *= not ended
        return bool(ended)


class VecEnv(Batch):
    """The interface of Stable-Baselines3, whose spaces are those of one env."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def seed(self, seed: int) -> None:
        self.random = [np.random.RandomState(seed + env) for env in range(self.num_envs)]

    def reset(self) -> np.ndarray:
        self.counts[:] = 0
        return np.stack([self.drawn(env) for env in range(self.num_envs)])

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        observations, dones, infos = self.reset_none(), np.zeros(self.num_envs, bool), []
        for env in range(self.num_envs):
            observations[env], info = self.drawn(env), {"action": int(self.actions[env])}
            dones[env] = self.advanced(env)
            if dones[env]:
                info.update({"terminal_observation": observations[env].copy(), "TimeLimit.truncated": env == 1})
                observations[env] = self.drawn(env)
            infos.append(info)
        return observations, self.actions.astype(np.float32) / 3, dones, infos

    def reset_none(self) -> np.ndarray:
        return np.zeros((self.num_envs, 2), np.float32)

    def step(self, actions: Any) -> Any:
        self.step_async(actions)
        return self.step_wait()

    def close(self) -> None:
        pass


def tensor(n: int, dtype: str, *shape: int) -> Any:
    return SimpleNamespace(eltype=SimpleNamespace(n=n, dtype_name=dtype), shape=shape)


class Gym3(Batch):
    """The interface of gym3."""

    ob_space = {"rgb": tensor(256, "uint8", 2, 3)}
    ac_space = tensor(15, "int32")

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.num = num_envs
        self.seen = [self.image(env) for env in range(num_envs)]
        self.rewards, self.first = np.zeros(num_envs, np.float32), np.ones(num_envs, bool)

    def image(self, env: int) -> np.ndarray:
        return self.random[env].randint(0, 256, (2, 3)).astype(np.uint8)

    def observe(self) -> Any:
        return self.rewards, {"rgb": np.stack(self.seen)}, self.first

    def act(self, actions: Any) -> None:
        self.rewards = actions.astype(np.float32)
        self.first = np.array([self.advanced(env) for env in range(self.num)])
        self.seen = [self.image(env) for env in range(self.num)]

    def get_info(self) -> list[dict[str, Any]]:
        return [{"level": env} for env in range(self.num)]
