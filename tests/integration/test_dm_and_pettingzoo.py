"""Envs of dm_control and of PettingZoo by name, and by factory: equal, bit for bit, to the same env run directly."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import other_sims
import pytest
from hubs import ServedHub, serve
from pages import ROOT, blocks

import envhub

NUM_ENVS, STEPS = 3, 120
SEEDS = [11, 12, 13]


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    offered = [f"{name}={factory}" for name, factory in other_sims.KINDS.items()]
    with serve(tmp_path_factory.mktemp("met"), *offered, "dm_control/*") as hub:
        yield hub


@pytest.fixture(
    params=["tcp", pytest.param("embedded", marks=pytest.mark.long), pytest.param("ipc", marks=pytest.mark.chaos)]
)
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(met: ServedHub, lane: str, name: str, **options: Any) -> Any:
    """Envs of a hub by name, or of a private hub by their factory."""
    if lane == "embedded":
        return closing(envhub.make_vec(getattr(other_sims, other_sims.KINDS[name][11:]), NUM_ENVS, **options))
    return closing(envhub.make_vec(name, NUM_ENVS, hub=met.ipc if lane == "ipc" else met.tcp, **options))


def equal(batched: Any, index: int, single: Any) -> bool:
    """Whether the env's part of a batch has the bytes of what the env itself gave."""
    if isinstance(single, dict):
        return list(batched) == list(single) and all(equal(batched[key], index, single[key]) for key in single)
    expected = np.asarray(single, batched.dtype)
    return bool(batched[index].shape == expected.shape and batched[index].tobytes() == expected.tobytes())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "seeded"), [("swing", lambda env: env.task.random), pytest.param("sphero", None, marks=pytest.mark.chaos)]
)
def test_dm_control_by_name_is_equal_to_the_env_itself(met: ServedHub, lane: str, name: str, seeded: Any) -> None:
    alone = [getattr(other_sims, other_sims.KINDS[name][11:])() for _ in SEEDS]
    for env, seed in zip(alone, SEEDS, strict=True):
        (seeded(env) if seeded else env.random_state).seed(seed)
    with made(met, lane, name, autoreset_mode="SameStep") as envs:
        assert envs.lane == ("wire" if lane == "tcp" else "shared")
        observations, infos = envs.reset(seed=SEEDS)
        steps = [env.reset() for env in alone]
        assert infos == {} and all(equal(observations, row, step.observation) for row, step in enumerate(steps))
        envs.action_space.seed(1)
        ended = 0
        for _ in range(STEPS):
            actions = envs.action_space.sample()
            observations, rewards, terminations, truncations, infos = envs.step(actions)
            for row, env in enumerate(alone):
                step = env.step(actions[row])
                assert rewards[row] == step.reward and not terminations[row] and truncations[row] == step.last()
                if step.last():
                    ended += 1
                    assert equal_objects(infos["final_obs"][row], step.observation)
                    assert infos["final_info"]["timestep.discount"][row] == step.discount == 1.0
                    step = env.reset()
                else:
                    assert infos["timestep.discount"][row] == step.discount
                assert equal(observations, row, step.observation)
        assert ended == (NUM_ENVS * (STEPS // 40) if name == "sphero" else 0)
        assert [type(random) for random in envs.np_random] == [np.random.Generator] * NUM_ENVS
        assert envs.np_random_seed == tuple(SEEDS)
        assert envs.get_attr("control_timestep") == (alone[0].control_timestep(),) * NUM_ENVS


def equal_objects(found: Any, expected: Any) -> bool:
    return list(found) == list(expected) and all(np.array_equal(found[key], expected[key]) for key in expected)


@pytest.mark.long
def test_dm_control_by_shimmys_id_is_equal_to_shimmys_env(met: ServedHub) -> None:
    with closing(envhub.make_vec("dm_control/cartpole-swingup-v0", 2, hub=met.tcp)) as envs:
        alone = gym.make_vec("shimmy:dm_control/cartpole-swingup-v0", 2, vectorization_mode="sync")
        assert equal_batches(envs.reset(seed=4)[0], alone.reset(seed=4)[0])
        for _ in range(20):
            actions = alone.action_space.sample()
            hosted, direct = envs.step(actions), alone.step(actions)
            assert equal_batches(hosted[0], direct[0]) and np.array_equal(hosted[1], direct[1])
            assert np.array_equal(hosted[4]["timestep.discount"], direct[4]["timestep.discount"])
        alone.close()


def equal_batches(found: Any, expected: Any) -> bool:
    return all(found[key].tobytes() == expected[key].tobytes() for key in expected)


@pytest.mark.long
def test_commands_and_program_of_the_page_run(tmp_path: Path) -> None:
    page = ROOT / "server/docs/serve.md"
    (commands,) = (block for block in blocks("sh", [page]) if block.startswith("pip install"))
    (program,) = blocks("python dm_env", [page])
    _, serving = commands.replace("\\\n", " ").splitlines()
    arguments = shlex.split(serving)
    assert arguments[:4] == ["envhub", "serve", "--bind", "tcp://127.0.0.1:5555"]
    with serve(tmp_path, *arguments[4:]) as hub:
        program = program.replace("tcp://127.0.0.1:5555", hub.tcp)
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "archer_0" in ran.stdout, ran.stderr
