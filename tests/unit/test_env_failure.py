"""What a trainer reads about a truncated env, and how the client lays it out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from envhub_client.envs.observations import Observations
from envhub_client.lanes.base import Batch
from gymnasium import spaces
from gymnasium.vector import VectorEnv

import envhub
from envhub.env_failure import EnvFailure, failure_info
from envhub.values import codec

FAILURE = EnvFailure("crash", "worker 3 was ended by SIGSEGV", signal="SIGSEGV", restarts=2)


class Envs(VectorEnv[Any, Any, Any]):
    """Lays infos out for so many envs."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


def batch(arrays: list[np.ndarray], *infos: tuple[int, Any]) -> Batch:
    return Batch(arrays, None, None, None, [(row, codec.encode(info)) for row, info in infos], [])


def test_failure_is_a_read_only_mapping_of_its_fields() -> None:
    assert envhub.EnvFailure is EnvFailure and FAILURE["signal"] == FAILURE.signal == "SIGSEGV"
    assert dict(FAILURE)["exit_status"] is None and len(FAILURE) == len(dict(FAILURE)) == 10
    with pytest.raises(KeyError):
        FAILURE["keys"]
    with pytest.raises(AttributeError):
        FAILURE.cause = "timeout"  # type: ignore[misc]


def test_failure_pickles_and_copies() -> None:
    for again in (pickle.loads(pickle.dumps(FAILURE)), copy.deepcopy(FAILURE)):
        assert again == FAILURE and hash(again) == hash(FAILURE)


def test_failures_are_laid_out_one_per_env() -> None:
    seen = Observations(spaces.Box(-1, 1, (2,)), 3, False)
    truncated = batch([np.zeros((3, 2), np.float32)], (1, codec.decode(failure_info(FAILURE))))
    infos = seen.take(truncated).batched(Envs(3))
    assert infos["env_failure"].tolist() == [None, FAILURE, None]
    assert infos["_env_failure"].tolist() == infos["_invalid_transition"].tolist() == [False, True, False]
    assert infos["invalid_transition"].tolist() == [False, True, False] and "final_obs" not in infos


def test_own_info_of_an_env_by_that_name_is_left_alone() -> None:
    seen = Observations(spaces.Discrete(3), 1, False)
    found = seen.take(batch([np.zeros(1, np.int64)], (0, {"env_failure": {"hard": True}}))).by_env()
    assert found == {0: {"env_failure": {"hard": True}}}


def test_same_step_mode_has_the_last_observation_as_final_obs() -> None:
    space = spaces.Dict({"pose": spaces.Box(-1, 1, (2,)), "gear": spaces.Discrete(5), "word": spaces.Text(3)})
    seen = Observations(space, 2, False, same_step=True)
    gears, poses = np.array([3, 4]), np.array([[0, 0.5], [1, 1]], np.float32)
    assert [leaf.shape for leaf in seen.leaves] == [(), (2,)]  # a Dict space sorts its keys
    words = [(row, [codec.encode([word]), b""]) for row, word in enumerate(("a", "b"))]
    seen.take(batch([gears, poses], *words))
    info = codec.encode({"invalid_transition": True})
    found = seen.take(batch([gears, poses], (0, [b"", info]), (1, [b"", b""]))).by_env()
    final = found[0]["final_obs"]
    assert list(found) == [0] and found[0]["final_info"] == {}
    assert final["gear"] == 3 and final["pose"].tolist() == [0, 0.5] and final["word"] == "a"
    poses[0] = 9  # the lane writes there again
    assert final["pose"].tolist() == [0, 0.5] and seen.batch([gears, poses])["word"] == ("a", "b")


def test_final_obs_of_a_part_is_that_of_its_own_env() -> None:
    seen = Observations(spaces.Box(-9, 9, (1,)), 4, False, same_step=True)
    rows = [(3, codec.encode({"invalid_transition": True, "final_info": {"n": 1}}))]
    flags = np.zeros(2, bool)
    observations = [np.array([[1.0], [3.0]], np.float32)]
    part = Batch(observations, np.zeros(2), flags, flags, rows, [], np.array([1, 3]))
    info = seen.take(part).by_env()[3]
    assert info["final_obs"].tolist() == [3.0] and info["final_info"] == {"n": 1}
