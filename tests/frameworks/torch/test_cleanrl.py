"""``envhub.legacy_infos``: infos as Gymnasium 0.29 laid them out, read as CleanRL's scripts read them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import RecordEpisodeStatistics as VectorRecordEpisodeStatistics
from hubs import kill_worker, serve, worker_pid, worker_pids
from telling_env import Telling

import envhub

NUM_ENVS = 3


def legacy(**options: Any) -> Any:
    factories = [functools.partial(Telling, place) for place in range(NUM_ENVS)]
    return envhub.legacy_infos(envhub.make_vec(factories, NUM_ENVS, autoreset_mode="SameStep", **options))


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    """The same types, too, arrays' and numbers' included."""
    assert type(found) is type(wanted), f"{where}: {type(found)} and {type(wanted)}"
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, (tuple, list)) or (isinstance(wanted, np.ndarray) and wanted.dtype == object):
        assert len(found) == len(wanted) and getattr(found, "dtype", None) == getattr(wanted, "dtype", None), where
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}[{place}]")
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted), where
    else:
        assert found == wanted, where


def test_layout_is_the_older_one() -> None:
    envs = legacy(num_workers=1)
    _, infos = envs.reset(seed=1)
    none = np.full(NUM_ENVS, None)
    place = none.copy()
    place[:] = [{"of": 0}, {"of": 1}, {"of": 2}]
    everywhere = np.ones(NUM_ENVS, bool)
    assert_same(infos, {"began": np.ones(NUM_ENVS, int), "_began": everywhere, "sub": place, "_sub": everywhere})
    envs.step(np.zeros(NUM_ENVS, int))
    *_, infos = envs.step(np.zeros(NUM_ENVS, int))  # env 0 ends its episode
    only, others = np.array([True, False, False]), np.array([False, True, False])
    final_info, final_observation, sub = none.copy(), none.copy(), none.copy()
    final_info[0] = {"kind": True, "episode": {"r": np.array([3.5]), "l": np.array([2])}}
    final_observation[0], sub[0] = np.array([0, 102], np.float32), {"of": 0}
    wanted = {
        "began": np.array([2, 0, 0]),
        "_began": only,
        "sub": sub,
        "_sub": only,
        "final_observation": final_observation,
        "_final_observation": only,
        "final_info": final_info,
        "_final_info": only,
    }
    kind = np.array([0, 0, np.int64(7)])
    wanted |= {"kind": kind, "_kind": ~only & ~others}
    assert_same(infos, wanted)
    envs.close()


def returns_of_ppo(envs: Any, steps: int) -> list[float]:
    """The returns that CleanRL's PPO logs; with an observation after each end that is not the next episode's first."""
    returns, (observations, _) = [], envs.reset(seed=1)
    for _ in range(steps):
        next_observations, _, terminations, truncations, infos = envs.step((observations[:, 2] > 0).astype(int))
        if "final_info" in infos:
            for info in infos["final_info"]:
                if info and "episode" in info:
                    returns.append(float(info["episode"]["r"]))
        real_next = next_observations.copy()
        for row in np.flatnonzero(terminations | truncations):
            real_next[row] = infos["final_observation"][row]
            assert not np.array_equal(real_next[row], next_observations[row]) or "env_failure" in infos
        observations = next_observations
    return returns


def recorded() -> gymnasium.Env[Any, Any]:
    return RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))


def test_scripts_of_cleanrl_find_their_episodes(tmp_path: Path) -> None:
    envs = envhub.legacy_infos(envhub.make_vec(recorded, 2, num_workers=1, autoreset_mode="SameStep"))
    found = returns_of_ppo(envs, 200)
    envs.close()
    with serve(tmp_path, "CartPole-v1") as hub:
        served = envhub.make_vec("CartPole-v1", 2, hub=hub.tcp, autoreset_mode="SameStep")
        envs = VectorRecordEpisodeStatistics(envhub.legacy_infos(served))
        ended, (observations, _) = [], envs.reset(seed=1)
        for _ in range(200):
            observations, _, _, _, infos = envs.step((observations[:, 2] > 0).astype(int))
            ended += infos["episode"]["r"][infos["_episode"]].tolist() if "episode" in infos else []
        envs.close()
    assert len(found) >= 4 and all(8 <= each <= 500 for each in found)
    assert found == ended


def test_an_episode_that_a_crash_cut_short_is_left_out() -> None:
    others = worker_pids()  # of sessions that nobody has closed
    envs = envhub.legacy_infos(envhub.make_vec(recorded, 2, num_workers=2, autoreset_mode="SameStep"))
    observations, _ = envs.reset(seed=1)
    observations = envs.step(np.zeros(2, int))[0]
    kill_worker(worker_pid(others))
    _, rewards, _, truncations, infos = envs.step(np.zeros(2, int))
    (row,) = np.flatnonzero(truncations)
    assert infos["env_failure"][row].cause == "crash" and infos["env_failure"][1 - row] is None
    assert infos["invalid_transition"].tolist() == truncations.tolist() and rewards[row] == 0
    assert np.array_equal(infos["final_observation"][row], observations[row])
    assert infos["final_info"][row] == {} and infos["final_info"][1 - row] is None
    assert "episode" not in infos
    envs.close()


def test_other_envs_and_modes_are_refused() -> None:
    envs = envhub.make_vec("CartPole-v1", 2, num_workers=1)
    with pytest.raises(ValueError, match='autoreset_mode="SameStep"'):
        envhub.legacy_infos(envs)
    envs.close()
    with pytest.raises(TypeError, match="got a SyncVectorEnv"):
        envhub.legacy_infos(gymnasium.vector.SyncVectorEnv([recorded]))  # type: ignore[arg-type]


def test_what_a_vector_wrapper_does_not_have_is_the_envs_own() -> None:
    envs = legacy(num_workers=1)
    envs.reset()
    assert envs.get_attr("place") == (0, 1, 2) and envs.call_some([1], "get_wrapper_attr", "place") == (1,)
    assert envs.num_envs == NUM_ENVS and envs.single_action_space.n == 3
    with pytest.raises(AttributeError):
        envs.get_no_such_attribute()
    envs.close()
