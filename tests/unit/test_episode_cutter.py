"""Episodes are cut out of a tape's blocks as their outcomes say, across blocks, with nothing of other episodes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from envhub.recording.episodes import Episode, EpisodeCutter, StepOutcome
from envhub.recording.tape import BLOCKS, Tape, TapeShape, new_tape, steps_of, tape_bytes

FLOAT = ["<f8", []]
STEPS = 6


def shape(places: int = 2) -> TapeShape:
    return TapeShape(places, STEPS, [FLOAT], [FLOAT], mode="SameStep")


@pytest.fixture
def tape() -> Iterator[Tape]:
    made, descriptor = new_tape(shape())
    yield made
    os.close(descriptor)


def cutter() -> EpisodeCutter:
    return EpisodeCutter(shape(), [4, 7], {}, lambda episode, frames: None)


def cut(tape: Tape, cutter: EpisodeCutter, outcomes: list[list[int]], notes: Any = (), first: int = 0) -> list[Episode]:
    """Episodes of a block with these outcomes by step and place; observations count steps, 100 more at each place."""
    block = tape.blocks[0]
    count = np.arange(first, first + STEPS)[:, None] + 100 * np.arange(2)
    block.observations[0][:], block.finals[0][:], block.actions[0][:] = count, count + 0.5, -count
    block.rewards[:] = count / 10
    return list(cutter.cut(block, np.array(outcomes, np.uint8), dict(notes)))


def column(parts: list[Any]) -> list[float]:
    return [float(value) for value in np.concatenate(parts)]


B, S, F, C, A = StepOutcome.BEGIN, StepOutcome.STEP, StepOutcome.FINAL, StepOutcome.CUT, StepOutcome.ABORT
T, U, X = (
    StepOutcome.STEP | StepOutcome.TERMINATED,
    StepOutcome.STEP | StepOutcome.TRUNCATED,
    StepOutcome.STEP | StepOutcome.TRUNCATED | StepOutcome.FAILED,
)


def test_episode_begins_at_one_step_and_has_those_after_it(tape: Tape) -> None:
    (found,) = cut(tape, cutter(), [[B, 0], [S, 0], [S, 0], [T, 0]], {(0, 0): 11}.items())
    assert (found.env_id, found.seed, found.ended, found.steps) == (4, 11, "terminated", 3)
    assert column(found.observations[0]) == [0, 1, 2, 3] and column(found.actions[0]) == [-1, -2, -3]
    assert column(found.rewards) == [0.1, 0.2, 0.3] and found.nbytes == 8 * 4 + 8 * 3 * 2
    assert [flags.tolist() for flags in found.terminations_and_truncations()] == [[False, False, True], [False] * 3]


def test_last_observation_comes_from_the_finals_where_the_next_episode_begins_in_the_same_step(tape: Tape) -> None:
    one = cutter()
    (found,) = cut(tape, one, [[0, B], [0, S], [0, T | F | B], [0, S]])
    assert found.env_id == 7 and column(found.observations[0]) == [100, 101, 102.5]
    (rest,) = one.cut_all()
    assert rest.ended == "cut" and column(rest.observations[0]) == [102, 103]
    assert [flags.tolist() for flags in rest.terminations_and_truncations()] == [[False], [True]]


def test_episode_goes_on_in_the_next_block(tape: Tape) -> None:
    one = cutter()
    assert cut(tape, one, [[B, B], *[[S, S]] * 5]) == []
    ended = cut(tape, one, [[S, U], [T, 0]], first=6)
    assert [(each.env_id, each.steps, each.ended) for each in ended] == [(4, 7, "terminated"), (7, 6, "truncated")]
    assert column(ended[0].observations[0]) == [*range(8)] and one.running == []


def test_steps_in_which_only_others_were_reset_are_left_out(tape: Tape) -> None:
    found, _ = cut(tape, cutter(), [[B, 0], [S, 0], [0, B], [S, S], [0, C | B], [T, S]])
    assert column(found.observations[0]) == [0, 1, 3, 5] and found.steps == 3


def test_failures_have_what_was_said_of_them(tape: Tape) -> None:
    notes = {(2, 0): "crash: it died", (3, 1): "exception: it raised"}.items()
    first, second = sorted(cut(tape, cutter(), [[B, B], [S, S], [X, S], [0, C]], notes), key=lambda each: each.env_id)
    assert (first.ended, first.failure, first.steps) == ("failed", "crash: it died", 2)
    assert (second.ended, second.failure, second.steps) == ("failed", "exception: it raised", 2)


@pytest.mark.parametrize("seed", range(20))
def test_failed_episodes_are_the_same_where_no_others_are_cut_out(tape: Tape, seed: int) -> None:
    """As both autoreset modes have them; whatever an episode ends by, the next one begins with it or after it."""
    chance, runs = random.Random(seed), [False, False]
    every, failing = cutter(), EpisodeCutter(shape(), [4, 7], {}, lambda episode, frames: None, failed_only=True)
    found: list[list[Any]] = [[], []]
    for number in range(40):
        marks, notes = [], {}
        for step in range(STEPS):
            row = []
            for place, running in enumerate(runs):
                mark = chance.choice([S, S, T, U, X, C, A, T | F, 0]) if running else StepOutcome(0)
                if mark & C and chance.random() < 0.5:
                    notes[step, place] = f"exception: it raised in step {step}"
                elif mark & (C | A) or not mark & S:
                    mark |= chance.choice([B, StepOutcome(0)]) if mark or not running else StepOutcome(0)
                elif mark & F:
                    mark |= B
                runs[place] = bool(mark & B or (running and mark in (0, S)))
                row.append(int(mark))
            marks.append(row)
        for kept, one in zip(found, (every, failing), strict=True):
            kept += cut(tape, one, marks, notes.items(), first=number * STEPS)
    wanted, others = ([*map(vars, filter(lambda each: each.ended == "failed", kept))] for kept in found)
    assert len(wanted) > 5 and len(found[1]) < len(found[0]) / 1.2 and repr(others) == repr(wanted)


def test_aborted_episodes_are_dropped_and_what_is_not_begun_is_none(tape: Tape) -> None:
    one = cutter()
    found = cut(tape, one, [[B, S], [S, T], [A | B, 0], [T, 0]])
    assert [(each.ended, each.steps) for each in found] == [("dropped", 1), ("terminated", 1)]
    cut(tape, one, [[B, B], [S, 0]])
    assert one.drop_smallest().env_id == 7 and [each.env_id for each in one.running] == [4]
    (dropped,) = cut(tape, one, [[S, B], [S, S]])
    assert (dropped.env_id, dropped.ended) == (7, "dropped")


def test_blocks_share_the_memory_that_the_queue_may_have() -> None:
    one = TapeShape(64, 1, [["|u1", [210, 160, 3]]], [["<i8", []]], mode="NextStep")
    steps = steps_of(one, 1 << 29)
    whole = replace(one, steps=steps)
    assert steps > 1 and tape_bytes(whole) <= 1 << 29 < BLOCKS * (steps + 2) * one.block_bytes()
    assert steps_of(one, 1) == 1 and TapeShape.from_wire(whole.wire()) == whole


def test_reader_finds_what_was_complete_when_the_writer_ended(tape: Tape) -> None:
    assert tape.unfinished() == (0, 0)
    tape.begin(3)
    tape.words[1] = 5
    assert tape.unfinished() == (3, 5)
    tape.begin(None)
    assert tape.unfinished() == (0, 0)
