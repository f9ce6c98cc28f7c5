"""Whole episodes, cut out of the blocks of a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from envhub.recording.film import Film
from envhub.recording.tape import LAST, Block, StepMark, TapeShape


@dataclass
class Episode:
    """The steps of one env from a reset on.

    Attributes:
        env_id: of the session.
        seed: that the reset was given, if any.
        observations: for each leaf the parts of its column, which has one entry more than there are steps.
        actions: for each leaf the parts of its column.
        rewards: the parts of the column.
        last: the mark of its last step, the only one with flags; 0 for one that was cut or dropped.
        ended: why it is over: ``"terminated"``, ``"truncated"``, ``"failed"``, or ``"cut"`` by a reset or the end of
            the session, or ``"dropped"``; empty as long as it is under way.
        failure: what was said of the env's failure.
        steps: how many.
        nbytes: of all parts.
        film: of it, if it is filmed.
    """

    env_id: int
    seed: int | None
    observations: list[list[np.ndarray]]
    actions: list[list[np.ndarray]]
    rewards: list[np.ndarray] = field(default_factory=list)
    last: int = 0
    ended: str = ""
    failure: str = ""
    steps: int = 0
    nbytes: int = 0
    film: Film | None = None

    def terminations_and_truncations(self) -> tuple[np.ndarray, np.ndarray]:
        """Their columns; an episode that was cut is truncated at its last step."""
        terminations, truncations = np.zeros((2, self.steps), bool)
        terminations[-1] = self.last & StepMark.TERMINATED
        truncations[-1] = self.last & StepMark.TRUNCATED or not terminations[-1]
        return terminations, truncations


class EpisodeCutter:
    """Follows each env of a tape from block to block.

    Args:
        shape: of the tape.
        env_ids: the env of each place.
        films: the place in ``frames`` of each place that is filmed.
        on_frames: called with an episode and its next frames, as long as it is under way.
        failed_only: leaves out, as far as possible, episodes that do not fail.
    """

    def __init__(
        self,
        shape: TapeShape,
        env_ids: list[int],
        films: Mapping[int, int],
        on_frames: Callable[[Episode, np.ndarray], None],
        failed_only: bool = False,
    ) -> None:
        self._env_ids = env_ids
        self._films = films
        self._on_frames = on_frames
        self._failed_only = failed_only
        # Whatever the code of an env has made of the marks of its worker's tape.
        self._known = np.uint8(0xFF if shape.finals else 0xFF & ~StepMark.FINAL)
        self._running: list[Episode | None] = [None] * shape.places

    @property
    def running(self) -> list[Episode]:
        """The episodes under way."""
        return [episode for episode in self._running if episode is not None]

    def drop_largest(self) -> Episode:
        """The episode under way that has the most bytes, which ends here as ``"dropped"``."""
        place = max(
            (place for place, episode in enumerate(self._running) if episode is not None),
            key=lambda place: self._running[place].nbytes,  # type: ignore[union-attr]
        )
        return self._end(place, "dropped")

    def take(self, block: Block, steps: int, notes: Mapping[tuple[int, int], Any]) -> Iterator[Episode]:
        """Each episode that ends in these steps.

        ``notes`` has by step and place the seed of an episode that begins there, or what was said of a failure.
        """
        marks = block.marks[:steps] & self._known
        for place in np.flatnonzero(marks.any(axis=0)).tolist():
            at = 0
            for step, mark, note in self._events(marks[:, place], place, notes):
                self._extend(block, place, _steps(marks[:, place], at, step))
                yield from self._event(block, place, step, StepMark(mark), note)
                at = step + 1
            self._extend(block, place, _steps(marks[:, place], at, steps))

    def _events(
        self, marks: np.ndarray, place: int, notes: Mapping[tuple[int, int], Any]
    ) -> Iterator[tuple[int, int, Any]]:
        """Each step with which an episode begins or ends, its mark, and what was said of it."""
        steps = np.flatnonzero(marks & ~np.uint8(StepMark.STEP))
        found = [(step, mark, notes.get((step, place))) for step, mark in zip(steps.tolist(), marks[steps].tolist())]
        if not self._failed_only:
            yield from found
            return
        runs = self._running[place] is not None
        for (step, mark, note), following in zip_longest(found, found[1:]):
            ends, runs = runs, False
            if mark & StepMark.BEGIN:
                runs = following is None or bool(following[1] & StepMark.FAILED) or isinstance(following[2], str)
                mark = mark if runs else mark & ~StepMark.BEGIN
            if ends or runs:
                yield step, mark, note

    def _event(self, block: Block, place: int, step: int, mark: StepMark, note: Any) -> Iterator[Episode]:
        if self._running[place] is not None:
            failure = note if isinstance(note, str) else ""
            if mark & StepMark.ABORT:
                yield self._end(place, "dropped")
            elif mark & StepMark.CUT:
                yield self._end(place, "failed" if failure else "cut", failure)
            elif mark & StepMark.STEP:
                self._extend(block, place, slice(step, step + 1), finals=bool(mark & StepMark.FINAL))
                if mark & LAST:
                    flagged = "terminated" if mark & StepMark.TERMINATED else "truncated"
                    yield self._end(place, "failed" if mark & StepMark.FAILED else flagged, failure, mark)
        if mark & StepMark.BEGIN:
            seed = note if isinstance(note, int) else None
            first = [leaf[step : step + 1, place].copy() for leaf in block.observations]
            begun = Episode(self._env_ids[place], seed, [[part] for part in first], [[] for _ in block.actions])
            begun.nbytes = sum(part.nbytes for part in first)
            self._running[place] = begun
            self._film(block, place, begun, slice(step, step + 1))

    def _extend(self, block: Block, place: int, steps: slice | np.ndarray, finals: bool = False) -> None:
        """Add steps of one env, if an episode of it is under way; one in ``finals``, which has no frame."""
        episode, count = self._running[place], len(block.rewards[steps, place])
        if episode is None or not count:
            return
        columns = [
            *zip(episode.observations, block.finals if finals else block.observations, strict=True),
            *zip(episode.actions, block.actions, strict=True),
            (episode.rewards, block.rewards),
        ]
        for parts, array in columns:
            parts.append(array[steps, place].copy())
            episode.nbytes += parts[-1].nbytes
        episode.steps += count
        if not finals:
            self._film(block, place, episode, steps)

    def _film(self, block: Block, place: int, episode: Episode, steps: slice | np.ndarray) -> None:
        if place in self._films:
            self._on_frames(episode, block.frames[steps, self._films[place]])

    def cut_all(self, failure: str = "") -> Iterator[Episode]:
        """Every episode under way, which ends here, by this failure if there is one."""
        for place, episode in enumerate(self._running):
            if episode is not None:
                yield self._end(place, "failed" if failure else "cut", failure)

    def _end(self, place: int, how: str, failure: str = "", mark: int = 0) -> Episode:
        episode, self._running[place] = self._running[place], None
        assert episode is not None
        episode.ended, episode.failure, episode.last = how, failure, mark
        return episode


def _steps(marks: np.ndarray, start: int, stop: int) -> slice | np.ndarray:
    """The steps from ``start`` to ``stop`` in which the env was stepped; in others, only other envs were reset."""
    found: np.ndarray = np.flatnonzero(marks[start:stop] == StepMark.STEP) + start
    return slice(start, stop) if len(found) == stop - start else found
