"""The half of a recording that sees the envs, with a test in place of the process that writes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from tape_reader import TapeReader

from envhub.recording.recorder import EpisodeRecorder, Moves, Selection
from envhub.recording.tape import BLOCKS

SPACES = Box(-9, 99999, (1,)), Discrete(2)
NO = np.zeros(1, bool)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ours, theirs
    ours.close()
    theirs.close()


def recorder_of(end: socket.socket, mode: str = "NextStep", queue_bytes: int = 1, **chosen: Any) -> EpisodeRecorder:
    recorder = EpisodeRecorder(end, Selection(1, [0], **chosen), SPACES, mode, queue_bytes)
    recorder.open(wait_s=0.0)
    return recorder


def step(recorder: EpisodeRecorder, number: int, ended: bool = False) -> None:
    recorder.acted([np.zeros(1, int)])
    flags = np.full(1, float(number)), np.full(1, ended), NO
    recorder.stepped([np.full((1, 1), number, np.float32)], flags, {})


def test_block_that_the_line_has_no_room_for_is_kept(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # in fact a few messages
    recorder = recorder_of(ends[0])
    reader = TapeReader(ends[1])
    number = 0
    for _ in range(5):  # episodes of four steps, of which the line has room for some
        for at in range(40):
            begins = at % 5 == 0
            number = 0 if begins else number + 1
            if begins:
                recorder.reset(None, [at], [np.zeros((1, 1), np.float32)])
            else:
                step(recorder, number)
        assert not recorder.closed
        reader.read()
    reader.read()
    assert recorder.dropped and any(episode.ended == "dropped" for episode in reader.episodes)
    whole = [episode for episode in reader.episodes if episode.ended == "cut"]
    assert len(whole) > 1
    for episode in whole:
        observations = np.concatenate(episode.observations[0])[:, 0].tolist()
        assert observations == [0, *np.concatenate(episode.rewards).tolist()] == [*range(5)]


def test_seeds_are_handed_over_at_once_as_long_as_half_of_the_blocks_are_free(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    recorder = recorder_of(ends[0], queue_bytes=1 << 20)
    reader = TapeReader(ends[1])
    first, yes = [np.zeros((1, 1), np.float32)], np.ones(1, bool)
    recorder.reset(None, [1], first)
    for seed in range(2, 10):
        recorder.stepped(first, (np.ones(1), NO, yes), {})
        recorder.stepped(first, (np.ones(1), NO, NO), {}, Moves(None, [0], {}, {0: seed}))
    assert not recorder.dropped and len(recorder.tape.free) == BLOCKS // 2 - 1
    reader.read()
    assert [episode.seed for episode in reader.episodes] == [1, 2, 3] and reader.notes == [1, 2, 3, 4]


def test_episodes_of_an_env_are_counted_once_whichever_worker_serves_it() -> None:
    begun, recorded = np.zeros(1, np.int64), []
    first, yes = [np.zeros((1, 1), np.float32)], np.ones(1, bool)
    for number in range(6):  # each episode in a worker of its own
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        recorder = EpisodeRecorder(ends[0], Selection(1, [0], [0], 2), SPACES, "SameStep", 1 << 16, begun)
        recorder.open((2, 2, 3), wait_s=0.0)
        if number:  # it completes the last step of the one before
            recorder.stepped(first, (np.ones(1), yes, NO), {0: {"final_obs": None}}, Moves(None, [0]))
        else:
            recorder.reset(None, [0], first)
        recorded.append(bool(recorder.frames_due))
        if recorder.frames_due:
            recorder.add_frames([np.zeros((2, 2, 3), np.uint8)])
        recorder.acted([np.zeros(1, int)])
        recorder.stepped(first, (np.ones(1), yes, NO), {0: {"final_obs": np.ones(1)}}, last=True)
        assert not recorder.frames_due
        recorder.close()
        ends[1].close()
    assert recorded == [True, False] * 3 and begun.tolist() == [6]


@pytest.mark.parametrize("how", ["failed", "broke off"])
def test_episode_that_fails_while_there_is_no_room_is_dropped_once(
    ends: tuple[socket.socket, socket.socket], how: str
) -> None:
    recorder = recorder_of(ends[0])  # each block has room for a step
    reader = TapeReader(ends[1])
    recorder.reset(None, None, [np.zeros((1, 1), np.float32)])
    for number in range(1, BLOCKS):
        step(recorder, number)
    if how == "failed":
        recorder.failed({0: "exception: it raised"})
    else:
        recorder.broke_off(0, "exception: it raised")
    for _ in range(2):
        reader.read()
        recorder.reset(None, None, [np.zeros((1, 1), np.float32)])
        for number in range(1, 6):
            reader.read()
            step(recorder, number, ended=number == 5)
    reader.read()
    assert [each.ended for each in reader.episodes].count("dropped") == 1 and not recorder.dropped
    assert [np.concatenate(each.rewards).tolist() for each in reader.episodes if each.ended == "terminated"] == [
        [1.0, 2.0, 3.0, 4.0, 5.0]
    ] * 2
