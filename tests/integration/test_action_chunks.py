"""Chunks of actions give what a loop over the same env by hand gives."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from combinations import each_value
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Text, Tuple
from gymnasium.vector import AutoresetMode
from hubs import ServedHub
from same import assert_same

import envhub

K = 4


class ByHand:
    """One env in an autoreset mode, stepped by a loop."""

    def __init__(self, name: str, mode: AutoresetMode, seed: int) -> None:
        self.env, self.mode, self.ended = gym.make(name, max_episode_steps=30), mode, False
        self.env.reset(seed=seed)

    def reset(self) -> tuple[Any, ...]:
        self.ended = False
        return self.env.reset()[0], 0.0, False, False, {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        if self.ended and self.mode is AutoresetMode.NEXT_STEP:
            return self.reset()
        rewards = [0.0] * K
        total = 0.0
        for number in range(K):
            observation, reward, terminated, truncated, info = self.env.step(actions[number])
            rewards[number] = float(reward)
            total += float(reward)
            if terminated or truncated:
                break
        self.ended = terminated or truncated
        info = {**info, "chunk_rewards": np.array(rewards), "chunk_steps": number + 1}
        if self.ended and self.mode is AutoresetMode.SAME_STEP:
            info = {"final_obs": observation, "final_info": info}
            observation, *_ = self.reset()
        return observation, total, terminated, truncated, info


@pytest.mark.parametrize(
    ("name", "lane", "mode"),
    each_value(["CartPole-v1", "Pendulum-v1"], ["wire", "auto"], AutoresetMode, others=pytest.mark.long),
)
def test_chunks_are_a_loop_by_hand(hub: ServedHub, name: str, lane: Any, mode: AutoresetMode) -> None:
    wrappers = [("TimeLimit", {"max_episode_steps": 30}), ("ActionChunk", {"k": K})]
    address = None if lane == "auto" else hub.tcp
    options: dict[str, Any] = {"lane": lane, "autoreset_mode": mode, "wrappers": wrappers, "info_mode": "by_env"}
    with closing(envhub.make_vec(name, 3, hub=address, **options)) as envs:
        assert envs.is_wrapped("envhub.action_chunk:ActionChunk") == (True,) * 3 and envs.env_spec is not None
        hands = [ByHand(name, mode, seed) for seed in (5, 6, 7)]
        envs.reset(seed=5)
        envs.action_space.seed(2)
        for number in range(25):
            ended = np.array([hand.ended for hand in hands])
            if mode is AutoresetMode.DISABLED and ended.any():
                observations, _ = envs.reset(options={"reset_mask": ended})
                assert_same([*observations[ended]], [hand.reset()[0] for hand in hands if hand.ended], "reset")
            actions = envs.action_space.sample()
            wanted = [*zip(*(hand.step(each) for hand, each in zip(hands, actions, strict=True)), strict=True)]
            *arrays, infos = envs.step(actions)
            assert_same(arrays, [*map(np.array, wanted[:-1])], f"step {number}")
            assert_same([infos.get(row, {}) for row in range(3)], [*wanted[-1]], f"infos {number}")


class AnyActions(gym.Env[Any, Any]):
    """Checks its actions; it ends at the third action."""

    observation_space = Box(-np.inf, np.inf, (), np.float64)

    def __init__(self, action_space: Space[Any]) -> None:
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.given: list[Any] = []
        return np.float64(0), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        assert self.action_space.contains(action)
        self.given.append(action)
        return np.float64(0), 1.0, len(self.given) == 3, False, {"chunk": 1}


@pytest.mark.parametrize(
    ("space", "batch"),
    [
        (Box(-1, 1, (2,), np.float32), Box),
        (Discrete(3, start=-1), MultiDiscrete),
        (MultiDiscrete([3, 2]), Box),
        (MultiBinary(3), Box),
        (Dict(a=Discrete(2), b=Tuple([Box(0, 1), MultiBinary([2, 2])])), Dict),
    ],
    ids=str,
)
def test_actions_have_an_axis_in_front(space: Space[Any], batch: type) -> None:
    env = envhub.ActionChunk(AnyActions(space), 5)
    assert isinstance(env.action_space, batch)
    env.reset()
    _, total, terminated, _, info = env.step(env.action_space.sample())
    assert (total, terminated, len(env.unwrapped.given)) == (3.0, True, 3)
    assert info["chunk"] == 1 and info["chunk_steps"] == 3 and info["chunk_rewards"].tolist() == [1, 1, 1, 0, 0]


def test_what_cannot_be_a_chunk_is_refused_by_name(hub: ServedHub) -> None:
    with pytest.raises(TypeError, match="those of this env are of Text"):
        envhub.ActionChunk(AnyActions(Dict(a=Discrete(2), b=Text(3))), 2)
    for k in (0, 1025, True, 2.0):
        with pytest.raises(ValueError, match="from 1 to 1024"):
            envhub.make_vec("CartPole-v1", 1, hub=hub.tcp, wrappers=[("ActionChunk", {"k": k})])


def test_rewards_with_axes_are_added_by_axis() -> None:
    class TwoObjectives(AnyActions):
        def step(self, action: Any) -> tuple[Any, ...]:
            observation, reward, *rest = super().step(action)
            return observation, np.array([reward, len(self.given)], np.float64), *rest

    env = envhub.ActionChunk(TwoObjectives(Discrete(2)), 4)
    env.reset()
    _, total, _, _, info = env.step(env.action_space.sample())
    assert total.tolist() == [3, 6] and info["chunk_rewards"].tolist() == [[1, 1], [1, 2], [1, 3], [0, 0]]
