"""Recordings and replays of envs that were restored from snapshots say so."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brittle import Brittle
from envhub_server import replay
from hubs import written_replay
from sims import Counter
from test_recording import about_each, data_set

import envhub


@pytest.mark.long
def test_recorded_episode_says_where_it_was_branched(tmp_path: Path) -> None:
    envs: Any = envhub.make_vec(partial(Counter, 4), 2, snapshots=True, record=tmp_path)
    envs.reset(seed=1)
    for step in range(7):  # four of an episode, a reset, and two
        envs.step(np.array([step, 10 + step]))
    with envs.snapshot(name="half") as snapshot:
        envs.step(np.array([7, 17]))
        envs.restore(snapshot, [1], source=0)
        for step in range(3):
            envs.step(np.array([20 + step, 30 + step]))
    envs.close()
    data = data_set(tmp_path)
    episodes = {(each["env_id"], each["episode"]): each | {"data": data[n]} for n, each in enumerate(about_each(data))}
    branched = episodes[1, 2]
    assert branched["branched_from"] == {"snapshot": "half", "env_id": 0, "episode": 1, "step": 2}
    assert branched["data"].observations[:, 0].tolist() == [2, 3, 4]
    assert branched["data"].actions.tolist()[:2] == [30, 31] and branched["ended"] == "terminated"
    assert episodes[1, 1]["ended"] == "cut" and episodes[1, 1]["data"].observations[:, 0].tolist() == [0, 1, 2, 3]
    assert episodes[0, 1]["data"].observations[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert [key for key, each in episodes.items() if "branched_from" in each] == [(1, 2)]


def test_no_episode_begins_at_a_snapshot_of_an_ended_one(tmp_path: Path) -> None:
    envs: Any = envhub.make_vec(partial(Counter, 2), 1, snapshots=True, record=tmp_path)
    envs.reset(seed=1)
    for _ in range(2):
        envs.step(np.zeros(1, int))
    with envs.snapshot() as snapshot:
        assert snapshot.ended == (True,)
        for _ in range(2):
            envs.restore(snapshot)
            for _ in range(5):  # the reset that follows, two steps, another one and a step
                envs.step(np.zeros(1, int))
    envs.close()
    whole = [each for each in data_set(tmp_path) if each.observations[:, 0].tolist() == [0, 1, 2]]
    assert len(whole) >= 1 and len(whole) == sum(each.terminations.any() for each in data_set(tmp_path))
    assert not any("branched_from" in each for each in about_each(data_set(tmp_path)))


@pytest.mark.long
def test_replay_of_an_env_that_was_restored_says_so_until_its_next_reset(tmp_path: Path) -> None:
    make = partial(Brittle, "exception", rate=0.0)
    with closing(envhub.make_vec(make, 1, snapshots=True, on_exception="truncate")) as envs:
        envs.reset(seed=3)
        envs.step(np.array([1]))
        with envs.snapshot() as snapshot:
            for seed in (None, 4):
                envs.restore(snapshot)
                if seed is not None:
                    envs.reset(seed=seed)
                envs.step(np.array([2]))
                envs.set_attr("rate", 1.0)
                *_, infos = envs.step(np.array([3]))
                verdict = replay.run(written_replay(infos["env_failure"][0].replay))
                assert verdict.alike is (seed is not None), verdict.text
                assert seed is not None or f"went on from snapshot {snapshot.name!r}" in verdict.text
                envs.step(np.array([0]))
