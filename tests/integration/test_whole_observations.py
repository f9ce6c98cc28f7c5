"""What is returned in an env's place is one observation: all of its parts are of the same step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combinations import each_value, every_pair
from faulty import KILL, RAISE
from hubs import ServedHub, serve, wait_until

import envhub

LANES = ["ipc", "tcp"]
SHORT, LONG = 1, 600  # the longer text has no room in the arena
STEP = 0
OFFERED = "parts=faulty:faulty_parts", "unfinished=faulty:unfinished"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), *OFFERED) as served:
        yield served


def make(hub: ServedHub, lane: str, repeats: int, name: str = "parts", **options: Any) -> envhub.HubVectorEnv:
    found = {"num_workers": 3, "repeats": repeats, **options}
    return envhub.make_vec(name, 3, hub=getattr(hub, lane), **found)


def steps_of(observations: Any, repeats: int) -> list[int]:
    """How many steps each row shows, in all of its parts."""
    steps = [int(row[0]) for row in observations["steps"]]
    assert list(observations["said"]) == [f"step {count}" * repeats for count in steps]
    return steps


def failed(envs: envhub.HubVectorEnv, *actions: int) -> None:
    with pytest.raises((KeyError, envhub.WorkerDied)):
        envs.step(np.array(actions))


def kill(envs: envhub.HubVectorEnv, row: int) -> None:
    """End the row's worker while nothing is under way; another has taken its place once this returns."""
    pids = envs.call("pid")
    os.kill(pids[row], signal.SIGKILL)
    assert wait_until(lambda: _pid(envs, row) not in (None, pids[row]), 20)


def _pid(envs: envhub.HubVectorEnv, row: int) -> int | None:
    try:
        return int(envs.call("pid")[row])
    except envhub.WorkerDied:
        return None


@pytest.mark.parametrize(
    ("lane", "repeats", "first"), each_value(LANES, [SHORT, LONG], [RAISE, KILL], others=pytest.mark.long)
)
def test_truncation_after_a_step_that_raised_is_of_one_step(
    parts: ServedHub, lane: str, repeats: int, first: int
) -> None:
    policy = {} if first == RAISE else {"on_crash": "raise", "on_exception": "truncate"}
    then = KILL if first == RAISE else RAISE
    with closing(make(parts, lane, repeats, **policy)) as envs:
        assert steps_of(envs.reset()[0], repeats) == [0, 0, 0]
        assert steps_of(envs.step(np.full(3, STEP))[0], repeats) == [1, 1, 1]
        failed(envs, first, STEP, STEP)
        observations, _, _, truncations, _ = envs.step(np.array([STEP, then, STEP]))
        assert truncations.tolist() == [False, True, False]
        assert steps_of(observations, repeats)[1:] == [2, 3]
        failed(envs, *((first, STEP, STEP) if first == RAISE else (STEP, STEP, KILL)))
        steps_of(envs.step(np.array([STEP, STEP, STEP]))[0], repeats)


@pytest.mark.parametrize(("lane", "repeats"), each_value(LANES, [SHORT, LONG], others=pytest.mark.long))
def test_env_that_is_down_for_a_while_shows_one_step(parts: ServedHub, lane: str, repeats: int, tmp_path: Path) -> None:
    held_by = tmp_path / "held"
    with closing(make(parts, lane, repeats, restart_wait=0.0, held_by=str(held_by))) as envs:
        envs.reset()
        envs.step(np.full(3, STEP))
        failed(envs, RAISE, STEP, STEP)
        held_by.touch()  # until the next but one has failed; else that could be the new env's reset, which none is told
        failed(envs, RAISE, KILL, STEP)
        failed(envs, RAISE, STEP, STEP)
        held_by.unlink()
        while True:
            observations, _, _, truncations, _ = envs.step(np.full(3, STEP))
            seen = steps_of(observations, repeats)
            assert seen[1] == (2 if truncations[1] else 0)
            if not truncations[1]:
                break


@pytest.mark.long
@pytest.mark.parametrize(
    ("lane", "repeats", "mode"),
    every_pair(LANES, [SHORT, LONG], ["NextStep", "Disabled"], some=(), others=pytest.mark.chaos),
)
def test_env_rebuilt_after_a_step_that_raised_shows_one_step(
    parts: ServedHub, lane: str, repeats: int, mode: str
) -> None:
    with closing(make(parts, lane, repeats, autoreset_mode=mode)) as envs:
        envs.reset()
        envs.step(np.full(3, STEP))
        failed(envs, RAISE, STEP, STEP)
        kill(envs, 1)
        mask = {"reset_mask": np.array([True, False, False])}
        assert steps_of(envs.reset(options=mask)[0], repeats) == [0, 2, 2]
        observations, _, _, truncations, _ = envs.step(np.full(3, STEP))
        assert truncations.tolist() == [False, True, False] and steps_of(observations, repeats) == [1, 2, 3]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("repeats", [SHORT, LONG])
def test_truncation_for_who_has_just_attached_is_of_one_step(parts: ServedHub, lane: str, repeats: int) -> None:
    first = make(parts, lane, repeats)
    first.reset()
    first.step(np.full(3, STEP))
    client = envhub.connect(getattr(parts, lane))
    with closing(client), closing(client.attach(first.token)) as envs:
        observations, _, _, truncations, _ = envs.step(np.array([STEP, KILL, STEP]))
        assert truncations.tolist() == [False, True, False] and steps_of(observations, repeats) == [2, 1, 2]
    first.close(terminate=True)


@pytest.mark.parametrize("lane", LANES)
def test_env_left_out_of_a_reset_after_half_an_observation_shows_one_step(parts: ServedHub, lane: str) -> None:
    with closing(make(parts, lane, SHORT, "unfinished")) as envs:
        envs.reset()
        envs.step(np.full(3, STEP))
        with pytest.raises((ValueError, TypeError)):
            envs.step(np.array([STEP, RAISE, STEP]))
        mask = {"reset_mask": np.array([True, False, False])}
        assert steps_of(envs.reset(options=mask)[0], SHORT) == [0, 1, 2]


@pytest.mark.long
def test_rows_that_a_reset_leaves_out_on_another_hub_show_the_step_that_raised(
    parts: ServedHub, tmp_path: Path
) -> None:
    with serve(tmp_path, *OFFERED) as other:
        for lane in LANES:
            hubs = [getattr(hub, lane) for hub in (parts, other)]
            with closing(envhub.make_vec("parts", 3, hub=hubs, split=[2, 1], repeats=SHORT)) as envs:
                envs.reset()
                envs.step(np.full(3, STEP))
                failed(envs, STEP, STEP, RAISE)
                mask = {"reset_mask": np.array([False, False, True])}
                assert steps_of(envs.reset(options=mask)[0], SHORT) == [2, 2, 0]
