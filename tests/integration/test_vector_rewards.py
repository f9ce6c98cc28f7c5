"""Rewards with axes: one per agent or per objective, as ``AsyncVectorEnv`` returns them, on every lane."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combinations import each_value
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from hubs import ServedHub, serve
from large_sims import Objectives
from sims import Counter

import envhub

NUM_ENVS = 3
ZEROS = np.zeros(NUM_ENVS, np.int64)
WHERE = ["shared", "wire", "ipc", "tcp"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("objectives"), "objectives=large_sims:Objectives") as served:
        yield served


@contextlib.contextmanager
def made(where: str, hub: ServedHub, *, num_envs: int = NUM_ENVS, **options: Any) -> Iterator[Any]:
    kwargs = {name: options.pop(name) for name in ("objectives", "as_list", "infos", "declared") if name in options}
    if where in ("ipc", "tcp"):
        envs = envhub.make_vec("objectives", num_envs, hub=getattr(hub, where), env_kwargs=kwargs, **options)
    else:
        lane = "wire" if where == "wire" else "auto"
        factories = [partial(Objectives, **kwargs)] * num_envs
        envs = envhub.make_vec(factories, num_workers=2, lane=lane, **options)
    with contextlib.closing(envs):
        yield envs


@pytest.mark.long
@pytest.mark.parametrize(("where", "infos"), each_value(WHERE, ["", "numbers", "text"]))
def test_rewards_have_the_axes_that_async_vector_env_gives(where: str, infos: str, hub: ServedHub) -> None:
    upstream = AsyncVectorEnv([partial(Objectives, infos=infos)] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
    with contextlib.closing(upstream), made(where, hub, infos=infos, autoreset_mode="SameStep") as envs:
        upstream.reset(seed=1)
        envs.reset(seed=1)
        for _ in range(5):
            observations, rewards, terminations, truncations, found = envs.step(ZEROS)
            wanted = upstream.step(ZEROS)
            assert rewards.dtype == wanted[1].dtype == np.float64 and rewards.shape == (NUM_ENVS, 2)
            assert rewards.tolist() == wanted[1].tolist()
            assert observations[:, 0].tolist() == wanted[0][:, 0].tolist() and set(found) == set(wanted[4])
            assert terminations.tolist() == wanted[2].tolist() and not truncations.any()


@pytest.mark.parametrize(("objectives", "as_list"), each_value([1, 4], [False, True], others=pytest.mark.long))
def test_step_that_resets_has_zeros(objectives: int, as_list: bool, hub: ServedHub) -> None:
    with made("shared", hub, objectives=objectives, as_list=as_list) as envs:
        envs.reset(seed=1)
        found = [envs.step(ZEROS)[1][0].tolist() for _ in range(5)]
        step = [[count + number / 4 for number in range(objectives)] for count in (1, 2, 3)]
        assert found == [*step, [0.0] * objectives, step[0]]


@pytest.mark.parametrize("where", ["shared", "tcp"])
def test_parts_of_a_batch_have_rewards_with_axes(where: str, hub: ServedHub) -> None:
    with made(where, hub, infos="numbers") as envs:
        envs.reset(seed=1)
        envs.send(np.zeros(2, np.int64), [0, 2])
        _, rewards, _, _, infos, env_ids = envs.recv()
        assert rewards.tolist() == [[1.0, 1.25]] * 2 and env_ids.tolist() == [0, 2] and set(infos) == {"n", "_n"}


@pytest.mark.parametrize("where", ["shared", "tcp"])
def test_env_that_dies_has_zeros(where: str, hub: ServedHub) -> None:
    with made(where, hub, restart_wait=30.0, num_workers=NUM_ENVS) if where == "tcp" else made(where, hub) as envs:
        envs.reset(seed=1)
        envs.step(ZEROS)
        _, rewards, _, truncations, infos = envs.step(np.array([0, 900, 0]))
        assert truncations[1] and rewards.tolist()[1] == [0.0, 0.0] and rewards.tolist()[0] == [2.0, 2.25]
        assert set(infos) == {"env_failure", "_env_failure", "invalid_transition", "_invalid_transition"}


def test_reward_of_another_shape_is_the_envs_error(hub: ServedHub) -> None:
    with made("shared", hub) as envs:
        envs.reset(seed=1)
        envs.step(ZEROS)
        with pytest.raises(ValueError, match=r"step of env 1 returned a reward of shape \(3,\), and \(2,\) before"):
            envs.step(np.array([0, 901, 0]))


def test_envs_whose_rewards_differ_in_shape_are_no_fault_of_their_hub() -> None:
    envs = [partial(Objectives, number) for number in (2, 3)]
    with contextlib.closing(envhub.make_vec(envs, num_workers=2, on_hub_loss="recreate")) as different:
        different.reset()
        for _ in range(2):
            with pytest.raises(ValueError, match="envs that step together have rewards of one shape"):
                different.step(ZEROS[:2])


def test_single_env_returns_its_reward(hub: ServedHub) -> None:
    with contextlib.closing(envhub.make("objectives", hub=hub.tcp)) as env:
        env.reset(seed=1)
        reward: Any = env.step(0)[1]
        assert reward.tolist() == [1.0, 1.25]


@pytest.mark.parametrize("where", ["shared", "tcp"])
def test_reward_space_is_that_of_the_envs(where: str, hub: ServedHub) -> None:
    with made(where, hub, declared=True) as envs:
        assert envs.single_reward_space == spaces.Box(0, 9, (2,)) and envs.reward_shape == (2,)
    with made(where, hub) as envs:
        assert envs.single_reward_space is None and envs.reward_shape == ()


class OfAgents(Counter):
    """Has a ``reward_space`` as multi-agent envs have it, by agent."""

    def reward_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 9, (2,))


@pytest.mark.long
def test_method_is_no_reward_space(tmp_path: Path) -> None:
    with contextlib.closing(envhub.make_vec(OfAgents, 2, num_workers=1, record=tmp_path)) as envs:
        assert envs.single_reward_space is None and envs.reward_shape == ()


@pytest.mark.long
@pytest.mark.parametrize("declared", [True, False])
def test_recording_refuses_rewards_with_axes(declared: bool, hub: ServedHub, tmp_path: Path) -> None:
    refused = pytest.raises(ValueError, match=r"rewards of shape \(2,\), and for a recording a reward is one number")
    with refused, made("shared", hub, declared=declared, record=tmp_path) as envs:
        assert not declared
        envs.reset(seed=1)
        envs.step(ZEROS)
    assert not [*tmp_path.glob("recording-*/data/*/*.arrow")]
