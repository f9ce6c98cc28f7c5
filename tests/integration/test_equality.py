"""Stepping through a hub gives what ``SyncVectorEnv`` gives, bit for bit: on every lane, in every autoreset mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sims
from combinations import every_pair
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from hubs import LANES, lane_address
from same import assert_same

import envhub

STEPS, STEPS_SHORT = 300, 40
NUM_ENVS = 5
ENVS = ["CartPole-v1", "Pendulum-v1", "Blackjack-v1", "nested", "ALE/Pong-v5", "HalfCheetah-v5"]
KWARGS: dict[str, dict[str, Any]] = {
    "ALE/Pong-v5": {"max_episode_steps": 25},
    "HalfCheetah-v5": {"max_episode_steps": 20},
}

Record = tuple[Any, ...]


def factory(name: str) -> Callable[[], gym.Env[Any, Any]]:
    if name == "nested":
        return sims.Nested
    if name.startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
    return functools.partial(gym.make, name, **KWARGS.get(name, {}))


def hub_envs(name: str, address: str | None, workers: int, mode: AutoresetMode) -> VectorEnv[Any, Any, Any]:
    if address is None and name == "nested":
        return envhub.make_vec([sims.Nested] * NUM_ENVS, num_workers=workers, autoreset_mode=mode)
    return envhub.make_vec(
        name, NUM_ENVS, hub=address, num_workers=workers, autoreset_mode=mode, env_kwargs=KWARGS.get(name)
    )


def run(envs: VectorEnv[Any, Any, Any], mode: AutoresetMode, steps: int) -> Iterator[Record]:
    """Everything the envs return for a fixed run of so many steps."""
    actions = gym.vector.utils.batch_space(envs.single_action_space, NUM_ENVS)
    actions.seed(11)
    yield envs.reset(seed=42, options={"level": 3})
    for _ in range(steps):
        record = envs.step(actions.sample())
        yield record
        done = record[2] | record[3]
        if mode is AutoresetMode.DISABLED and done.any():
            yield envs.reset(options={"reset_mask": done})


@functools.cache
def reference(name: str, mode: AutoresetMode, steps: int) -> list[Record]:
    envs = SyncVectorEnv([factory(name)] * NUM_ENVS, autoreset_mode=mode)
    records = list(run(envs, mode, steps))
    envs.close()
    return records


def check(name: str, address: str | None, workers: int, mode: AutoresetMode, steps: int) -> None:
    envs = hub_envs(name, address, workers, mode)
    try:
        assert envs.metadata["autoreset_mode"] is mode
        count = 0
        for number, (found, wanted) in enumerate(
            zip(run(envs, mode, steps), reference(name, mode, steps), strict=True)
        ):
            assert_same(tuple(found), tuple(wanted), f"{name} record {number}")
            count += 1
        assert count > steps
    finally:
        envs.close()


# Each worker imports a library that takes a second.
SLOW = {
    ("ALE/Pong-v5", "embedded"),
    ("ALE/Pong-v5", "tcp"),
    ("HalfCheetah-v5", "tcp"),
    *((name, "ipc") for name in ENVS),
}
SHORT = [
    *(
        pytest.param(
            name, lane, workers, AutoresetMode.NEXT_STEP, marks=pytest.mark.long if (name, lane) in SLOW else ()
        )
        for name in ENVS
        for lane, workers in zip(LANES, (3, 1, 2), strict=True)
    ),
    *(
        (name, "tcp", 2, mode)
        for name in ("CartPole-v1", "nested", "Blackjack-v1")
        for mode in AutoresetMode
        if mode is not AutoresetMode.NEXT_STEP
    ),
]


@pytest.mark.parametrize(("name", "lane", "workers", "mode"), SHORT)
def test_hub_returns_what_sync_vector_env_returns(
    request: pytest.FixtureRequest, name: str, lane: str, workers: int, mode: AutoresetMode
) -> None:
    check(name, lane_address(request, lane), workers, mode, STEPS_SHORT)


@pytest.mark.chaos
@pytest.mark.parametrize(("name", "lane", "workers", "mode"), every_pair(ENVS, LANES, [1, 2, 3], list(AutoresetMode)))
def test_hub_returns_what_sync_vector_env_returns_everywhere(
    request: pytest.FixtureRequest, name: str, lane: str, workers: int, mode: AutoresetMode
) -> None:
    check(name, lane_address(request, lane), workers, mode, STEPS)


def test_python_numbers_reach_the_envs_as_python_numbers(address: str | None) -> None:
    envs = envhub.make_vec("counter", 3, hub=address) if address else envhub.make_vec([sims.Counter] * 3)
    envs.reset()
    envs.step([1, 2, 3])
    assert envs.get_attr("last_action") == (1, 2, 3)
    assert [type(action) for action in envs.get_attr("last_action")] == [int] * 3
    envs.step(np.array([1, 2, 3], np.int32))
    assert [type(action) for action in envs.get_attr("last_action")] == [np.int32] * 3
    envs.close()


@pytest.mark.parametrize("batch", [[2**63, -1], [np.array(1), np.array(0)]], ids=["mixed", "arrays of no dimension"])
def test_elements_reach_the_envs_as_they_are_in_the_list(batch: list[Any]) -> None:
    class Hearing(gym.Env[Any, Any]):
        observation_space = gym.spaces.Text(99)
        action_space = gym.spaces.Discrete(2)

        def reset(self, **_: Any) -> Any:
            return "", {}

        def step(self, action: Any) -> Any:
            return repr(action), 0.0, False, False, {}

    envs, wanted = (kind([Hearing] * 2) for kind in (envhub.AsyncVectorEnv, SyncVectorEnv))
    envs.reset(), wanted.reset()
    assert envs.step(batch)[0] == wanted.step(batch)[0]
    envs.close()


def test_different_spaces_of_one_shape_are_batched() -> None:
    def pendulum(torque: float) -> Callable[[], gym.Env[Any, Any]]:
        def make() -> gym.Env[Any, Any]:
            env = gym.make("Pendulum-v1")
            env.observation_space = gym.spaces.Box(-torque, torque, (3,), np.float32)
            return env

        return make

    factories = [pendulum(1.0), pendulum(2.0)]
    envs = envhub.make_vec(factories, observation_mode="different")
    wanted = SyncVectorEnv(factories, observation_mode="different")
    assert envs.observation_space == wanted.observation_space
    assert_same(envs.reset(seed=1), wanted.reset(seed=1), "reset")
    envs.close()
