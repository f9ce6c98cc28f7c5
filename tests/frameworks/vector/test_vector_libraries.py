"""EnvPool and envs of JAX in a hub give what they give directly."""

from __future__ import annotations

import functools
from contextlib import closing
from typing import Any

import envpool
import gymnasium
import numpy as np
import pytest
from hubs import kill_worker, worker_pid, worker_pids
from same import assert_same
from same_run import assert_step

import envhub

make_vector = functools.partial(gymnasium.make_vec, vectorization_mode="vector_entry_point")


def pong(num_envs: int, **arguments: Any) -> Any:
    return envpool.make_gymnasium("Pong-v5", num_envs=num_envs, max_episode_steps=20, **arguments)


LANES = [{"lane": "auto"}, {"lane": "wire"}]


@pytest.mark.parametrize("how", LANES, ids=str)
def test_envpool_gives_what_it_gives_directly(how: dict[str, Any]) -> None:
    num_envs = 16
    with closing(envhub.make_vec(pong, num_envs, vector=True, **how)) as envs:
        for seed in (7, [3, 9, 4, 4] * 4):
            seeds = [seed + env for env in range(num_envs)] if isinstance(seed, int) else seed
            direct = pong(num_envs, seed=seeds)
            assert_step(envs.reset(seed=seed), direct.reset(), num_envs, "reset")
            for number in range(60):
                actions = envs.action_space.sample()
                assert_step(envs.step(actions), direct.step(actions), num_envs, f"step {number}")
            mask = np.arange(num_envs) % 3 == 1
            observations, infos = direct.reset(options={"reset_mask": mask})
            found = envs.reset(options={"reset_mask": mask})
            assert_same(found[0][mask], observations, "masked reset")
            assert found[1]["lives"][mask].tolist() == infos["lives"].tolist()
            actions = envs.action_space.sample()
            assert_step(envs.step(actions), direct.step(actions), num_envs, "step after it")
        with pytest.raises(ValueError, match="seeded when it is made"):
            envs.reset(seed=[1, None] * 8)


def test_envpool_resets_in_the_same_step_by_masks() -> None:
    with closing(envhub.make_vec(pong, 3, vector=True, autoreset_mode="SameStep")) as envs:
        direct = pong(3, seed=[1, 2, 3])
        envs.reset(seed=1)
        direct.reset()
        ended = 0
        for number in range(50):
            actions = envs.action_space.sample()
            observations, rewards, terminations, truncations, infos = envs.step(actions)
            wanted = direct.step(actions)
            done = wanted[2] | wanted[3]
            if done.any():
                ended += int(done.sum())
                for row in np.flatnonzero(done):
                    assert_same(infos["final_obs"][row], wanted[0][row], "final_obs")
                    assert infos["final_info"]["elapsed_step"][row] == wanted[4]["elapsed_step"][row]
                wanted[0][done] = direct.reset(options={"reset_mask": done})[0]
            assert_same(observations, wanted[0], f"step {number}")
            assert truncations.tolist() == wanted[3].tolist() and terminations.tolist() == wanted[2].tolist()
            assert rewards.tolist() == wanted[1].tolist()
        assert ended >= 6


def test_envpool_in_shares_whose_envs_have_the_sessions_numbers() -> None:
    with closing(envhub.make_vec(pong, 5, vector=True, num_workers=2)) as envs:
        direct = pong(5, seed=[11, 12, 13, 14, 15])
        assert_step(envs.reset(seed=11), direct.reset(), 5, "reset")
        for number in range(30):
            actions = envs.action_space.sample()
            assert_step(envs.step(actions), direct.step(actions), 5, f"step {number}")


def test_envpool_is_truncated_when_its_worker_is_killed_and_goes_on() -> None:
    others = worker_pids()  # of sessions that nobody has closed
    # EnvPool is imported once more, which may take longer than a step waits by itself.
    with closing(envhub.make_vec(pong, 4, vector=True, restart_wait=60.0)) as envs:
        envs.reset(seed=1)
        nothing = np.zeros(4, np.int64)
        before = envs.step(nothing)[0]
        kill_worker(worker_pid(others))
        observations, rewards, _, truncations, infos = envs.step(nothing)
        assert truncations.all() and not rewards.any() and infos["env_failure"][3].cause == "crash"
        assert_same(observations, before, "last observations")
        assert not envs.step(nothing)[3].any()  # a reset
        assert envs.step(nothing)[4]["elapsed_step"].tolist() == [1] * 4


def test_envpool_that_is_no_vector_env_to_its_user_is_refused() -> None:
    with pytest.raises(TypeError, match="a vector env: pass vector=True"):
        envhub.make_vec(lambda: pong(2), 2)
    with pytest.raises(TypeError, match="with batch_size=1"):
        envhub.make_vec(lambda num_envs: pong(num_envs, batch_size=1), 2, vector=True)
    with (
        closing(envhub.make_vec(lambda num_envs: pong(num_envs), 2, vector=True)) as envs,
        pytest.raises(ValueError, match="its factory should take seed, and pass it on"),
    ):
        envs.reset(seed=1)


def test_env_of_jax_gives_what_it_gives_directly() -> None:
    with closing(envhub.make_vec("phys2d/CartPole-v1", 4, vector=True)) as envs:
        direct = make_vector("phys2d/CartPole-v1", num_envs=4)
        space = envs.action_space
        assert_same(envs.reset(seed=3)[0], np.asarray(direct.reset(seed=3)[0]), "reset")
        for number in range(60):
            actions = space.sample()
            found, wanted = envs.step(actions), direct.step(actions)
            assert_same(found[0], np.asarray(wanted[0]), f"step {number}")
            assert found[1].tolist() == np.asarray(wanted[1]).tolist()
            assert found[2].tolist() == np.asarray(wanted[2]).tolist()
