"""Batches of steps in memory, which the program fills and a process reads, and the episodes cut out of them."""

from __future__ import annotations

import contextlib
import enum
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict, Text, Tuple

from envhub.errors import UnsupportedSpace
from envhub.values.leaf import OBJECT
from envhub.values.spaces import leaves

BATCHES = 8
STEPS_MAX = 1024  # of a batch
SIDE_MAX = 1 << 13  # pixels of a frame
TEXT_CHARS_MAX = 1 << 20
MADV_POPULATE_WRITE = 23  # of linux/mman.h; Python has no name for it


class StepMark(enum.IntEnum):
    """Mark of an env in a step; most often none, as its flags and the autoreset mode say what happened."""

    STEPPED = 0
    RESET = 1  # by the program: the observation is the first one of an episode, and the flags mean nothing
    STILL = 2  # nothing, as only other envs were reset, or a snapshot was taken
    FAILED = 3  # the env failed in this step, which is the last one of its episode
    BROKEN_OFF = 4  # a reset or step had no result, so that the env may have moved unseen
    MISSED = 5  # there was no room for the steps before


class StepBatch:
    """The arrays of a batch, each with a row for a step and in it one for an env; observations and actions by leaf."""

    def __init__(self, memory: np.ndarray) -> None:
        names = memory.dtype.names or ()
        self.observations, self.finals, self.actions = (
            [memory[name] for name in names if name.startswith(kind)] for kind in ("observation", "final", "action")
        )
        self.rewards, self.terminations, self.truncations = (memory[name] for name in FLAGS)
        self.marks = memory["mark"]
        self.frames = memory["frame"] if "frame" in names else memory["mark"][:, :0]


FLAGS = "reward", "termination", "truncation"


def step_of(spaces: Sequence[Space[Any]], num_envs: int, has_finals: bool, frames: Sequence[int]) -> np.dtype[Any]:
    """A step's structured dtype; with ``has_finals``, an episode's last observation comes with the next one's first."""
    kinds = ["observation", "action", *(["final"] if has_finals else [])]
    fields: list[Any] = [
        (f"{kind}{number}", dtype, (num_envs, *shape))
        for kind, space in zip(kinds, [*spaces, spaces[0]], strict=False)
        for number, (dtype, shape) in enumerate(_columns(space))
    ]
    fields += [(name, "f8" if name == "reward" else "?", num_envs) for name in FLAGS]
    fields.append(("mark", "u1", num_envs))
    return np.dtype(fields + ([("frame", "u1", tuple(frames))] if frames else []), align=True)


def batches_of(step: np.dtype[Any], queue_bytes: int) -> tuple[int, int]:
    """The number of steps in a batch, at least one, and the bytes of all batches."""
    steps = max(1, min(STEPS_MAX, queue_bytes // BATCHES // step.itemsize))
    return steps, BATCHES * steps * step.itemsize


def mapped(descriptor: int, step: np.dtype[Any], steps: int) -> list[StepBatch]:
    memory = mmap.mmap(descriptor, BATCHES * steps * step.itemsize)
    with contextlib.suppress(OSError):  # of a kernel before 5.14
        # Else a step takes ten times as long where it is the first to write into a page.
        memory.madvise(MADV_POPULATE_WRITE)
    return [StepBatch(each) for each in np.frombuffer(memory, step).reshape(BATCHES, steps)]


def check_recordable(space: Space[Any]) -> None:
    for part in _parts(space):
        (leaf,) = leaves(part)
        if isinstance(part, Text) and part.max_length > TEXT_CHARS_MAX:
            raise UnsupportedSpace(
                f"{part} cannot be recorded: its texts may have more than {TEXT_CHARS_MAX} characters"
            )
        if leaf == OBJECT and not isinstance(part, Text):
            raise UnsupportedSpace(f"{part} cannot be recorded: Minari stores arrays of a fixed size and texts")
        if not leaf.items:
            raise UnsupportedSpace(f"{part} cannot be recorded: Minari stores nothing that has no elements")


def _parts(space: Any) -> Iterator[Any]:
    if isinstance(space, (Dict, Tuple)):
        for part in space.spaces.values() if isinstance(space, Dict) else space.spaces:
            yield from _parts(part)
    else:
        yield space


def _columns(space: Space[Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each leaf; a text has as many characters as its space allows."""
    for part in _parts(space):
        (leaf,) = leaves(part)
        yield (f"U{part.max_length}", ()) if isinstance(part, Text) else (leaf.dtype, leaf.shape)


NEXT_STEP, SAME_STEP = "NextStep", "SameStep"
_BREAKS = StepMark.RESET, StepMark.BROKEN_OFF, StepMark.MISSED

# The seed of an episode, the text of a failure, the number of episodes that were missed, or the name of a snapshot; of
# an env that was restored from one also the source's number and step.
Detail = int | str | dict[str, Any]
POINTS_MAX = 10_000  # snapshots of one env


@dataclass
class Episode:
    """The steps of one env from a reset on."""

    env_id: int
    number: int  # of the env's episodes
    seed: int | None
    branched_from: dict[str, Any] | None  # the snapshot, and of its source the number, the episode and the step
    since: int  # the first step of the batch that is not copied yet
    # For each leaf the parts of its column. That of observations has one entry more than there are steps.
    observations: list[list[np.ndarray]]
    actions: list[list[np.ndarray]]
    rewards: list[np.ndarray] = field(default_factory=list)
    ended: str = ""  # terminated, truncated, failed, cut by a reset or the end of the session, or dropped
    flags: tuple[bool, bool] = (False, False)  # the last step's
    failure: str = ""
    steps: int = 0
    nbytes: int = 0
    film: Film | None = None


class EpisodeCutter:
    """Follows the recorded envs from batch to batch.

    It copies the steps of an episode when that ends or the batch does. So one that began in the same batch, and ends
    in a way that is not ``kept``, is never copied.
    """

    def __init__(
        self,
        env_ids: Sequence[int],
        mode: str,
        every: int,
        kept: Collection[str],
        film_of: Mapping[int, int],  # the index among a step's frames of each row that is filmed
        on_frames: Callable[[Episode, np.ndarray], None],
    ) -> None:
        self._env_ids, self._film_of, self._on_frames = env_ids, film_of, on_frames
        self._mode, self._every, self._kept = mode, every, kept
        self._begun = [0] * len(env_ids)  # episodes, of which every n-th is recorded
        self._points: dict[tuple[str, int], int] = {}  # by snapshot and env, the number of the episode
        self._resets_next = [False] * len(env_ids)  # whether the next step is the reset after an episode
        self._under_way: dict[int, Episode] = {}  # by row
        self.dropped = 0  # episodes that began, and may have ended, in steps that were missed

    @property
    def nbytes(self) -> int:
        return sum(episode.nbytes for episode in self._under_way.values())

    def take(self, batch: StepBatch, steps: int, details: Mapping[tuple[int, int], Detail]) -> list[Episode]:
        """Each episode that ends in these steps; ``details`` are by step and row."""
        self._batch, ended = batch, list[Episode]()
        facts = [column[:steps].T for column in (batch.marks, batch.terminations, batch.truncations)]
        special = facts[1] | facts[2] | (facts[0] != StepMark.STEPPED)
        special[:, 1:] |= special[:, :-1]  # the step after an episode may be a reset
        special[:, :1] = True
        for row, chosen in enumerate(special):
            at = np.flatnonzero(chosen)
            for step, *of_step in zip(at.tolist(), *(each[row, at].tolist() for each in facts), strict=True):
                ended += self._follow(row, step, of_step, details.get((step, row)))
            if row in self._under_way:
                self._copy(row, steps)
                self._under_way[row].since = 0
        return ended

    def _follow(self, row: int, step: int, facts: list[Any], detail: Detail | None) -> Iterator[Episode]:
        """The episode that ends before this step or with it; the next one may begin with it."""
        mark, terminated, truncated = facts
        failed, flagged = mark == StepMark.FAILED, terminated or truncated
        failure, begins = detail if isinstance(detail, str) else "", False
        if mark == StepMark.STILL:
            if isinstance(detail, str):
                self._points[detail, self._env_ids[row]] = self._begun[row] - 1
                if len(self._points) > POINTS_MAX:
                    del self._points[next(iter(self._points))]
            if row in self._under_way:
                self._copy(row, step)
                self._under_way[row].since = step + 1
            return
        if mark in _BREAKS:
            if mark == StepMark.MISSED:
                self.miss(row, (detail if isinstance(detail, int) else 0) + self._resets_next[row])
            if row in self._under_way:
                how = "dropped" if mark == StepMark.MISSED else "failed" if failure else "cut"
                yield self._end(row, how, failure, step)
            begins, self._resets_next[row] = mark == StepMark.RESET, False
        elif self._resets_next[row]:
            begins, self._resets_next[row] = not failed, failed
        elif flagged or failed:
            begins = self._mode == SAME_STEP and not failed
            self._resets_next[row] = self._mode == NEXT_STEP or (self._mode == SAME_STEP and failed)
            if row in self._under_way:
                self._under_way[row].flags = terminated, truncated
                how = "failed" if failed else "terminated" if terminated else "truncated"
                yield self._end(row, how, failure, step + 1, has_final=not failed)
        if begins:
            if self._begun[row] % self._every == 0:
                seed, batch = detail if isinstance(detail, int) else None, self._batch
                observations: list[list[np.ndarray]] = [[] for _ in batch.observations]
                actions: list[list[np.ndarray]] = [[] for _ in batch.actions]
                number, branched_from = self._begun[row], None
                if isinstance(detail, dict):
                    parent = self._points.get((detail["snapshot"], detail["env_id"]))
                    branched_from = {**detail, "episode": parent}
                self._under_way[row] = Episode(
                    self._env_ids[row], number, seed, branched_from, step + 1, observations, actions
                )
            self._begun[row] += 1

    def miss(self, row: int, count: int) -> None:
        """Count episodes that began in steps that were missed, of which those drop that were to be recorded."""
        before, self._begun[row] = self._begun[row], self._begun[row] + count
        self.dropped += -(-self._begun[row] // self._every) - -(-before // self._every)

    def drop_smallest(self) -> Episode:
        """Drop the episode under way with the fewest bytes: else long ones would be recorded more rarely."""
        row = min(self._under_way, key=lambda each: self._under_way[each].nbytes)
        return self._end(row, "dropped")

    def end_all(self, how: str) -> list[Episode]:
        return [self._end(row, how) for row in [*self._under_way]]

    def _copy(self, row: int, end: int, has_final: bool = False) -> None:
        """Copy the steps before ``end``; the observation of the last one may be in ``finals``, and has no frame."""
        episode, batch = self._under_way[row], self._batch
        finals = batch.finals if has_final else []
        moved = slice(episode.since, end)
        seen = slice(episode.since - (not episode.observations[0]), end - bool(finals))  # with that of the reset
        for parts, column, steps in (
            *((parts, column, seen) for parts, column in zip(episode.observations, batch.observations, strict=True)),
            *(
                (parts, column, slice(end - 1, end))
                for parts, column in zip(episode.observations, finals, strict=False)
            ),
            *((parts, column, moved) for parts, column in zip(episode.actions, batch.actions, strict=True)),
            (episode.rewards, batch.rewards, moved),
        ):
            parts.append(column[steps, row].copy())
            episode.nbytes += parts[-1].nbytes
        episode.steps += end - episode.since
        if row in self._film_of:
            self._on_frames(episode, batch.frames[seen, self._film_of[row]])

    def _end(self, row: int, how: str, failure: str = "", end: int = 0, has_final: bool = False) -> Episode:
        if how in self._kept and end:
            self._copy(row, end, has_final)
        episode = self._under_way.pop(row)
        episode.ended, episode.failure = how, failure
        return episode


class Film:
    """An MP4 file (H.264), by PyAV, that grows by frames; H.264 wants even sides, so an odd one is repeated once."""

    def __init__(self, path: Path, fps: float, height: int, width: int) -> None:
        import av

        self._path = path
        self._make_frame = av.VideoFrame.from_ndarray
        self._container = av.open(str(path), "w", format="mp4")
        self._stream: Any = self._container.add_stream("libx264", rate=max(1, round(fps)))
        self._stream.pix_fmt = "yuv420p"
        self._odd = height % 2, width % 2
        self._stream.height, self._stream.width = height + height % 2, width + width % 2

    def add(self, frames: np.ndarray) -> None:
        """Add frames, uint8 ``(n, height, width, 3)``."""
        for frame in np.pad(frames, ((0, 0), *((0, odd) for odd in self._odd), (0, 0)), "edge"):
            self._container.mux(self._stream.encode(self._make_frame(np.ascontiguousarray(frame), format="rgb24")))

    def finish(self) -> Path:
        self._container.mux(self._stream.encode())
        self._container.close()
        return self._path

    def discard(self) -> None:
        self._container.close()
        self._path.unlink(missing_ok=True)
