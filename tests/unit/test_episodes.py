"""Episodes are cut out of batches of steps as the envs played them; what is missing is dropped and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_client.record_options import RecordOptions
from envhub_client.recording.episodes import (
    NEXT_STEP,
    SAME_STEP,
    Detail,
    Episode,
    EpisodeCutter,
    StepBatch,
    StepMark,
    batches_of,
    check_recordable,
    step_of,
)
from envhub_client.recording.process import _padded
from envhub_client.session.options import SessionOptions
from gymnasium.spaces import Box, Dict, Discrete, Graph, Sequence, Text

from envhub.errors import UnsupportedSpace

SPACES = Box(-9, 9, (1,)), Discrete(9)
KEPT = "failed", "terminated", "truncated", "cut"
ENDS, RESET, STILL, FAILED, BROKEN_OFF, MISSED = "ends", *[*StepMark][1:6]


class Player:
    """Writes steps of one env whose observation is the number of the step, and cuts them in batches of some steps."""

    def __init__(self, mode: str = NEXT_STEP, every: int = 1, steps: int = 3) -> None:
        self.cutter = EpisodeCutter([7], mode, every, KEPT, {}, lambda episode, frames: None)
        self.memory = np.zeros(steps, step_of(SPACES, 1, mode == SAME_STEP, ()))
        self.batch, self.at, self.number = StepBatch(self.memory), 0, 0
        self.details: dict[tuple[int, int], Detail] = {}
        self.ended: list[Episode] = []

    def play(self, *steps: Any, detail: Detail | None = None) -> Player:
        for step in steps:
            self.memory[self.at] = 0
            self.batch.observations[0][self.at], self.batch.actions[0][self.at] = self.number, self.number
            self.batch.marks[self.at] = step if isinstance(step, StepMark) else 0
            self.batch.terminations[self.at] = step == ENDS
            for column in self.batch.finals:
                column[self.at] = -self.number
            if detail is not None:
                self.details[self.at, 0] = detail
            self.at, self.number = self.at + 1, self.number + 1
            if self.at == len(self.memory):
                self.hand_over()
        return self

    def hand_over(self) -> None:
        self.ended += self.cutter.take(self.batch, self.at, self.details)
        self.at, self.details = 0, {}

    def told(self, how: str = "cut") -> list[tuple[str, list[int], list[int]]]:
        """Of each episode how it ended, its observations and its actions."""
        self.hand_over()
        return [
            (each.ended, *([int(value) for part in parts for value in part.ravel()] for (parts,) in both))
            for each in [*self.ended, *self.cutter.end_all(how)]
            for both in [(each.observations, each.actions)]
        ]


@pytest.mark.parametrize("steps", [1, 2, 3, 50])
def test_step_after_an_episode_is_the_reset(steps: int) -> None:
    player = Player(steps=steps).play(RESET, 0, 0, ENDS, 0, 0, ENDS, 0)
    assert player.told() == [
        ("terminated", [0, 1, 2, 3], [1, 2, 3]),
        ("terminated", [4, 5, 6], [5, 6]),
        ("cut", [7], []),
    ]


@pytest.mark.parametrize("steps", [1, 2, 50])
@pytest.mark.parametrize("every", [1, 2])
def test_last_observation_of_a_step_that_shows_the_next_episode_is_the_final_one(steps: int, every: int) -> None:
    player = Player(SAME_STEP, every, steps).play(RESET, 0, ENDS, 0, ENDS, ENDS, 0)
    whole = [
        ("terminated", [0, 1, -2], [1, 2]),
        ("terminated", [2, 3, -4], [3, 4]),
        ("terminated", [4, -5], [5]),
        ("cut", [5, 6], [6]),
    ]
    assert player.told() == whole[::every]


def test_env_that_was_not_reset_stays_in_its_episode() -> None:
    assert Player().play(RESET, 0, STILL, 0, RESET, 0).told() == [("cut", [0, 1, 3], [1, 3]), ("cut", [4, 5], [5])]
    assert Player().play(RESET, ENDS, STILL, 0).told() == [("terminated", [0, 1], [1]), ("cut", [3], [])]


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, "Disabled"])
def test_failure_ends_the_episode_with_its_step(mode: str) -> None:
    player = (
        Player(mode)
        .play(RESET, 0)
        .play(FAILED, detail="crash: gone")
        .play(FAILED, 0 if mode != "Disabled" else RESET, 0)
    )
    assert player.told() == [("failed", [0, 1, 2], [1, 2]), ("cut", [4, 5], [5])]
    assert player.ended[0].failure == "crash: gone"


def test_request_that_was_broken_off_cuts_the_episode_until_the_next_one_begins() -> None:
    player = Player().play(RESET, 0).play(BROKEN_OFF, detail="exception: no").play(0, 0, ENDS, 0, 0)
    assert player.told() == [("failed", [0, 1], [1]), ("cut", [6, 7], [7])]
    assert Player().play(RESET, 0, BROKEN_OFF, RESET).told()[0] == ("cut", [0, 1], [1])


@pytest.mark.parametrize(("every", "dropped"), [(1, 3), (2, 1)])
def test_steps_that_are_missing_drop_the_episode_under_way_and_count_those_that_began(every: int, dropped: int) -> None:
    player = Player(every=every).play(RESET, 0).play(MISSED, detail=3).play(0, 0, ENDS, 0, 0)
    wanted = [("dropped", [], []), *([("cut", [6, 7], [7])] if every in (1, 2) else [])]
    assert player.told() == wanted and player.cutter.dropped == dropped
    (player := Player().play(RESET, ENDS).play(MISSED, detail=0)).hand_over()
    assert player.cutter.dropped == 1  # its reset was among the steps that are missing


def test_smallest_episode_is_dropped_where_memory_is_full() -> None:
    player = Player(steps=50).play(RESET, 0, 0)
    player.hand_over()
    held = player.cutter.nbytes
    assert held and player.cutter.drop_smallest().ended == "dropped" and not player.cutter.nbytes
    assert player.play(0, ENDS, 0).told() == [("cut", [5], [])]


def test_texts_have_the_room_that_their_space_allows() -> None:
    space = Dict({"said": Text(5), "at": Discrete(3)})
    memory = np.zeros(2, step_of((space, SPACES[1]), 2, False, (1, 4, 6, 3)))
    batch = StepBatch(memory)
    at, said = batch.observations
    said[1], at[1] = ("ab", "häl\U0001f600o"), [1, 2]
    assert said.tolist() == [["", ""], ["ab", "häl\U0001f600o"]] and batch.frames.shape == (2, 1, 4, 6, 3)


def test_episode_that_begins_with_the_last_step_of_a_batch_is_padded_as_any() -> None:
    assert _padded([np.zeros((0, 2)), np.ones((3, 2))]).tolist() == [[1, 1]] * 3 + [[0, 0]]


def test_space_that_minari_cannot_store_is_refused() -> None:
    for space in (Graph(Discrete(2), None), Dict({"a": Sequence(Discrete(2))}), Box(0, 1, (0,)), Text(1 << 21)):
        with pytest.raises(UnsupportedSpace, match="cannot be recorded"):
            check_recordable(space)


def test_batches_have_a_step_at_least_and_share_the_memory() -> None:
    step = step_of(SPACES, 4, False, ())
    assert batches_of(step, 1) == (1, 8 * step.itemsize)
    assert batches_of(step, 80 * step.itemsize) == (10, 80 * step.itemsize)
    assert batches_of(step, 1 << 30)[0] == 1024


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"folder": 3}, "folder must be a path, got 3"),
        ({"env_ids": "0"}, r"env_ids must be numbers of envs, such as \[0, 1\], got '0'"),
        ({"env_ids": 3}, r"env_ids must be numbers of envs, such as \[0, 1\], got 3"),
        ({"env_ids": [True]}, "each of env_ids must be a whole number, got True"),
        ({"film": [0.0]}, "each of film must be a whole number, got 0.0"),
        ({"every": 1.5}, "every must be a whole number, got 1.5"),
        ({"queue_bytes": "1"}, "queue_bytes must be a whole number, got '1'"),
    ],
)
def test_value_of_another_type_is_named(said: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        RecordOptions(**{"folder": "runs", **said})


def test_folder_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r'folder is empty; "\." is the working directory'):
        SessionOptions(record="")
    with pytest.raises(ValueError, match=r"folder has a null character: 'a\\x00b'"):
        SessionOptions(record="a\0b")


def test_numbers_of_numpy_become_those_that_json_has() -> None:
    options = RecordOptions("runs", env_ids=np.arange(2), every=np.int64(3), film=np.array([1]))  # type: ignore[arg-type]
    numbers = [*options.chosen(2), *options.film, options.every]
    assert numbers == [0, 1, 1, 3] and {*map(type, numbers)} == {int}


def test_record_that_is_no_folder_is_named() -> None:
    assert SessionOptions(record=Path("runs")).record == RecordOptions(Path("runs"))
    with pytest.raises(TypeError, match="record must be a folder, a RecordOptions or None, got 3"):
        SessionOptions(record=3)  # type: ignore[arg-type]
