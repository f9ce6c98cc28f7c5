"""Whatever envs do, the episodes that are cut out of a tape are those that they had."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from tape_reader import TapeReader

from envhub.recording.episodes import Episode
from envhub.recording.marks import NEXT_STEP, SAME_STEP, Follower, StepMark
from envhub.recording.recorder import EpisodeRecorder, Moves, Selection

NUM_ENVS = 5
DISABLED = "Disabled"
SPACES = Box(-1, 1e6, (1,)), Discrete(1000)
ENDED = {"terminated": (True, False), "truncated": (False, True), "failed": (False, True)}
FAILURE = SimpleNamespace(cause="exception", message="it raised")


class Envs:
    """Envs whose observations count their steps, and what each of their episodes was.

    Attributes:
        had: of each env the episodes that have ended, or are under way: how, seed and observations.
        dropped: how many were broken off because a step was not to be recorded.
    """

    def __init__(self, recorder: EpisodeRecorder, mode: str, chance: random.Random) -> None:
        self._recorder, self._mode, self._chance = recorder, mode, chance
        self.had: list[list[dict[str, Any]]] = [[] for _ in range(NUM_ENVS)]
        self._runs, self._next, self._shown = [False] * NUM_ENVS, 0, np.zeros((NUM_ENVS, 1), np.float32)
        self._to_reset = [False] * NUM_ENVS  # by its next step

    def reset(self, mask: list[bool] | None) -> None:
        """Reset all envs or those of the mask."""
        seeds = [self._chance.choice([None, self._next + env]) for env in range(NUM_ENVS)]
        for env in range(NUM_ENVS):
            if mask is None or mask[env]:
                self._begin(env, seeds[env])
        self._recorder.reset(None if mask is None else np.array(mask), seeds, [self._shown])

    def _begin(self, env: int, seed: int | None = None) -> None:
        self._end(env, "cut")
        self._shown[env] = self._next = self._next + 1
        self.had[env].append({"ended": "", "seed": seed, "shown": [self._next]})
        self._runs[env], self._to_reset[env] = True, False

    def _end(self, env: int, how: str) -> None:
        if self._runs[env]:
            self.had[env][-1]["ended"] = how
        self._runs[env] = False

    def _move(self, env: int) -> int:
        self._next += 1
        if self._runs[env]:
            self.had[env][-1]["shown"].append(self._next)
        return self._next

    def step(self, moves: bool) -> None:
        """Step all envs, or with ``moves`` some of them, of which some may raise."""
        chance = self._chance
        stepped = [not moves or chance.random() < 0.7 for _ in range(NUM_ENVS)]
        raised = [env for env in range(NUM_ENVS) if moves and stepped[env] and chance.random() < 0.05]
        self._recorder.acted([np.arange(NUM_ENVS) + self._next])
        rewards, terminated, truncated = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS, bool)
        infos: dict[int, Any] = {}
        resets: list[int] = []
        for env in range(NUM_ENVS):
            if not stepped[env] or env in raised:
                continue
            if self._to_reset[env]:
                resets.append(env)
                self._begin(env)
                continue
            number, ended = self._move(env), chance.choice(["", "", "", "", *ENDED])
            rewards[env], self._shown[env] = number, number
            if not ended:
                continue
            terminated[env], truncated[env] = ENDED[ended]
            self._end(env, ended)
            self._to_reset[env] = self._mode == NEXT_STEP or (self._mode == SAME_STEP and ended == "failed")
            if ended == "failed":
                infos[env] = {"invalid_transition": True, "env_failure": FAILURE}
            elif self._mode == SAME_STEP:
                infos[env] = {"final_obs": np.full(1, number, np.float32)}
                self._begin(env)
        for env in raised:
            self._end(env, "failed")
            self._to_reset[env] = self._mode != DISABLED
        said = None
        if moves:
            still = np.array([stepped[env] and env not in raised for env in range(NUM_ENVS)])
            said = Moves(still, resets or None, dict.fromkeys(raised, "exception: it raised"))
        self._recorder.stepped([self._shown], (rewards, terminated, truncated), infos, said)

    def break_off(self) -> None:
        """A step ends without a result; the envs have moved unseen, and are reset."""
        self._recorder.acted([np.arange(NUM_ENVS)])
        for env in range(NUM_ENVS):
            self._end(env, "cut")
        self._recorder.broke_off()
        self.reset(None)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ours, theirs
    ours.close()
    theirs.close()


def told(episode: Episode) -> dict[str, Any]:
    """What an episode says of itself, as ``Envs.had``; its columns fit together."""
    shown, rewards = np.concatenate(episode.observations[0])[:, 0].tolist(), [0.0]
    if episode.rewards:
        rewards = np.concatenate(episode.rewards).tolist()
        assert shown[1:] == rewards and len(np.concatenate(episode.actions[0])) == len(rewards)
    return {"ended": episode.ended, "seed": episode.seed, "shown": shown}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 4))])
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
@pytest.mark.parametrize("reads", [1.0, 0.1])
def test_episodes_are_those_that_the_envs_had(
    ends: tuple[socket.socket, socket.socket], mode: str, every: int, moves: bool, reads: float, seed: int
) -> None:
    """With room for all steps each is found, else each that is found is whole, and no episode goes uncounted."""
    chance = random.Random(seed)
    selection = Selection(NUM_ENVS, range(NUM_ENVS), every=every)
    queue_bytes = 1 if reads < 1 else 1 << 14
    recorder = EpisodeRecorder(ends[0], selection, SPACES, mode, queue_bytes)
    recorder.open(wait_s=0.0)
    envs, reader = Envs(recorder, mode, chance), TapeReader(ends[1])
    envs.reset(None)
    for _ in range(400):
        what = chance.random()
        if what < 0.02:
            envs.break_off()
        elif what < (0.3 if mode == DISABLED else 0.05):
            envs.reset([chance.random() < 0.5 for _ in range(NUM_ENVS)])
        else:
            envs.step(moves)
        if chance.random() < reads:
            reader.read()
    reader.read()
    recorder.tape.read_answers()
    recorder.close()
    reader.read()
    reader.cut_all()
    wanted = [each for had in envs.had for each in had[::every]]
    for each in wanted:
        each["ended"] = each["ended"] or "cut"
    dropped = sum(each.ended == "dropped" for each in reader.episodes)
    found = [told(each) for each in reader.episodes if each.ended != "dropped"]
    by_first = {each["shown"][0]: each for each in wanted}
    for each in found:
        assert each == by_first[each["shown"][0]]
    assert len(found) + dropped + recorder.dropped == len(wanted)
    assert bool(dropped) == (reads < 1) and len(found) > len(wanted) / 20


RESET, STEPPED, STILL, FAILED, CUT, LAST = (
    StepMark.RESET,
    StepMark.STEPPED,
    StepMark.STILL,
    StepMark.FAILED,
    StepMark.CUT,
    StepMark.LAST,
)
# By mode: marks and flags of one env by step, and in which of them an episode begins and which belong to one before.
CASES: Mapping[str, list[tuple[list[int], list[int], list[int], list[int]]]] = {
    NEXT_STEP: [
        ([0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1]),
        ([0, STILL, STILL, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]),
        ([0, STEPPED, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]),
        ([0, FAILED, FAILED, 0], [0, 1, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]),
        ([0, CUT | STILL, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1]),
        ([0, STILL | RESET, STILL, 0], [0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]),
        ([RESET, 0, LAST], [1, 1, 0], [1, 0, 0], [0, 1, 0]),
    ],
    SAME_STEP: [
        ([0, 0, 0], [0, 1, 0], [0, 1, 0], [1, 1, 1]),
        ([FAILED, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]),
        ([0, LAST], [1, 1], [1, 0], [1, 1]),
    ],
    DISABLED: [([0, 0, RESET, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1])],
}


@pytest.mark.parametrize(("mode", "number"), [(mode, number) for mode in CASES for number in range(len(CASES[mode]))])
def test_steps_are_followed_alike_one_by_one_and_together(mode: str, number: int) -> None:
    marks, flags, begins, stepped = (np.array(row)[:, None] for row in CASES[mode][number])
    marks, flags = marks.astype(np.uint8), flags.astype(bool)
    together, one_by_one = Follower(1, mode), Follower(1, mode)
    found = together.follow(marks, flags)
    each = [one_by_one.follow(marks[step : step + 1], flags[step : step + 1]) for step in range(len(marks))]
    for wanted, rows, single in zip((begins, stepped), found, zip(*each, strict=True), strict=True):
        assert rows.astype(int).tolist() == np.concatenate(single).astype(int).tolist() == wanted.tolist()
    assert together.expecting == one_by_one.expecting


@pytest.mark.parametrize("sent", [False, True])
def test_ctrl_c_while_a_block_is_handed_over_records_no_step_twice(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    recorder = EpisodeRecorder(ends[0], Selection(NUM_ENVS, range(NUM_ENVS)), SPACES, NEXT_STEP, 1 << 14)
    recorder.open(wait_s=0.0)
    envs, reader = Envs(recorder, NEXT_STEP, random.Random(0)), TapeReader(ends[1])

    class Interrupted:
        """A line to the process in whose ``send`` Ctrl-C comes."""

        def send(self, message: bytes, flags: int = 0) -> None:
            if sent:
                ends[0].send(message)
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(ends[0], name)

    envs.reset(None)
    for _ in range(20):
        envs.step(False)
    monkeypatch.setattr(recorder.tape, "line", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        for _ in range(400):
            envs.step(False)
    monkeypatch.undo()
    recorder.broke_off()
    envs.reset(None)
    for _ in range(40):
        envs.step(False)
    recorder.close()
    reader.read()
    reader.cut_all()
    found = [told(each) for each in reader.episodes if each.ended in ENDED]
    had = [each for episodes in envs.had for each in episodes]
    assert len(found) > 10 and all(each in had for each in found)
    assert len({each["shown"][0] for each in found}) == len(found)
