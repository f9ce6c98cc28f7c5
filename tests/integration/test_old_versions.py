"""Workers under an interpreter with an old Gymnasium or gym: the trainer sees the contract of 1.4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from hubs import serve
from interpreters import FEW, Combination, interpreter

import envhub

OLD = [*FEW[:3], pytest.param(Combination("3.9", "gymnasium==0.26.3"), marks=pytest.mark.chaos)]


def name_of(combination: Combination) -> str:
    return combination.name


@pytest.fixture(params=OLD, ids=name_of)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A hub whose workers run under an interpreter with that package, NumPy and msgpack, and nothing of EnvHub's."""
    python = interpreter(request.config, request.param)
    with serve(tmp_path, "CartPole-v1", "Pendulum-v1", "--python", str(python)) as hub:
        yield hub.ipc


@pytest.mark.long
@pytest.mark.timeout(300)
def test_old_env_speaks_todays_contract(address: str) -> None:
    with envhub.connect(address) as client:
        assert client.envs() == ["CartPole-v1", "Pendulum-v1"]
    envs = envhub.make_vec("Pendulum-v1", 3, hub=address, num_workers=2)
    assert envs.single_observation_space.shape == (3,) and "render_modes" in envs.metadata
    first, infos = envs.reset(seed=4)
    assert infos == {} and np.array_equal(first, envs.reset(seed=4)[0])
    assert not np.array_equal(first, envs.reset(seed=5)[0])
    for step in range(1, 203):
        _, rewards, terminations, truncations, infos = envs.step(np.zeros((3, 1), np.float32))
        assert not terminations.any() and truncations.all() == (step == 200) and infos == {}
        assert (rewards == 0).all() == (step == 201)  # the reset that NEXT_STEP owes
    assert envs.np_random_seed == (5, 6, 7) and all(isinstance(one, np.random.Generator) for one in envs.np_random)
    assert envs.get_attr("max_torque") == (2.0, 2.0, 2.0)
    envs.set_attr("max_torque", [1.0, 2.0, 3.0])
    assert envs.get_attr("max_torque") == (1.0, 2.0, 3.0)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        envs.get_attr("no_such_attribute")
    envs.close()
    shown = envhub.make_vec("Pendulum-v1", 1, hub=address, render_mode="rgb_array")
    assert shown.render_mode == "rgb_array" and shown.get_attr("render_mode") == ("rgb_array",)
    shown.close()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "old", [FEW[3], pytest.param(Combination("3.8", "gymnasium==1.0.0"), marks=pytest.mark.chaos)], ids=name_of
)
def test_vector_env_of_an_old_gymnasium_is_hosted(
    request: pytest.FixtureRequest, tmp_path: Path, old: Combination
) -> None:
    python = interpreter(request.config, old)
    with serve(tmp_path, "CartPole-v1", "--vector", "--python", str(python)) as hub:
        envs = envhub.make_vec("CartPole-v1", 4, hub=hub.ipc)
        direct = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")
        assert envs.vector and np.array_equal(envs.reset(seed=1)[0], direct.reset(seed=1)[0])
        rewards = [envs.step(np.zeros(4, np.int64))[1] for _ in range(30)]
        assert not np.all(rewards)  # where an episode has ended, the next step was a reset
        envs.close()
        with pytest.raises(ValueError, match="autoreset_mode='Disabled' is not possible"):
            envhub.make_vec("CartPole-v1", 4, hub=hub.ipc, autoreset_mode="Disabled")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "old", [FEW[0], *(pytest.param(each, marks=pytest.mark.chaos) for each in FEW[1:3])], ids=name_of
)
def test_vector_env_of_a_version_without_them_is_refused_in_a_line(
    request: pytest.FixtureRequest, tmp_path: Path, old: Combination
) -> None:
    python = interpreter(request.config, old)
    with (
        serve(tmp_path, "CartPole-v1", "--vector", "--python", str(python)) as hub,
        pytest.raises(TypeError, match=rf"vector=True needs Gymnasium 1.0 or later, and here is {old.version[0]} 0\."),
    ):
        envhub.make_vec("CartPole-v1", 4, hub=hub.ipc)
