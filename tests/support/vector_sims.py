"""Vector envs of several libraries, and the same envs without a hub."""

from __future__ import annotations

from typing import Any

import brittle
import faulty
import gymnasium as gym
import numpy as np
import sims
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv


class Chatty(gym.Env[Any, Any]):
    """Ends after a number of steps that its seed draws; says in its infos what any kind of info can hold."""

    observation_space = spaces.Dict(
        {"at": spaces.Box(-1e9, 1e9, (2,), np.float32), "parts": spaces.Tuple([spaces.Discrete(50), spaces.Box(0, 1)])}
    )
    action_space = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)])

    def __init__(self, number: int) -> None:
        self.number, self.steps, self.moon = number, 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.length = 0, int(self.np_random.integers(2, 9))
        self.at = self.np_random.random(2, np.float32) + (options or {}).get("lift", 0)
        return self.seen(), {"began": self.length, "options": repr(options or None)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.at = self.at + action[1] * float(action[0])
        infos: dict[str, Any] = {"steps": self.steps, "at": self.at.copy(), "alive": True, "far": self.at.sum() > 1}
        infos["sums"] = {"x": float(self.at[0]), "deep": {"y": self.at[1]}}
        if self.steps % 2:
            infos["odd"] = np.int16(self.steps)
        if self.steps % (self.number + 2) == 0:
            infos["word"] = "äh" * self.steps
        ended = self.steps >= self.length
        return self.seen(), self.steps / 3, ended and self.number % 2 == 0, ended and self.number % 2 == 1, infos

    def seen(self) -> Any:
        return {"at": self.at, "parts": (np.int64(self.steps), np.full(1, self.number / 9, np.float32))}

    def double(self, value: int) -> int:
        return 2 * value + self.number


def chatty(num_envs: int, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> VectorEnv[Any, Any, Any]:
    """A vector env that can be had in each autoreset mode."""
    numbers = range(num_envs)
    return SyncVectorEnv([lambda number=number: Chatty(number) for number in numbers], autoreset_mode=autoreset_mode)


def failing(num_envs: int) -> VectorEnv[Any, Any, Any]:
    """A vector env whose envs fail as their actions say."""
    return SyncVectorEnv([Failing] * num_envs)


class Failing(faulty.Faulty):
    """Fails by an observation that is no number, too."""

    def spoil(self) -> None:
        self.drawn = float("nan")


class Spoiled(sims.Counter):
    """Its first step ends the episode with an observation that is no number."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def reset(self, **how: Any) -> Any:
        return np.zeros(1), super().reset(**how)[1]

    def step(self, action: Any) -> Any:
        return np.array([np.nan]), 0.0, True, False, {}


def spoiled(num_envs: int, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([Spoiled] * num_envs, autoreset_mode=autoreset_mode)


class Told(VectorEnv[Any, Any, Any]):
    """Reports the seed and the options of its resets; resets all of its envs or none."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Box(-1, 2**31, (1,), np.int64)
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs: int, mode: Any = AutoresetMode.NEXT_STEP) -> None:
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": mode}

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations = np.full((self.num_envs, 1), -1 if seed is None else seed)
        return observations, {"options": [repr(options)] * self.num_envs}

    def step(self, actions: Any) -> Any:
        none = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 1), np.int64), np.ones(self.num_envs), none, none, {"batch": self.num_envs}


def told(num_envs: int, mode: Any = AutoresetMode.NEXT_STEP) -> VectorEnv[Any, Any, Any]:
    return Told(num_envs, mode)


def counters(
    num_envs: int, length: int = 5, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP
) -> VectorEnv[Any, Any, Any]:
    """A vector env whose episodes all end together."""
    return SyncVectorEnv([lambda: sims.Counter(length=length)] * num_envs, autoreset_mode=autoreset_mode)


def brittles(
    num_envs: int, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **arguments: Any
) -> VectorEnv[Any, Any, Any]:
    """A vector env whose envs fail by chance."""
    return SyncVectorEnv([lambda: brittle.Brittle(**arguments)] * num_envs, autoreset_mode=autoreset_mode)
