"""Whole episodes, cut out of the blocks of a tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from itertools import zip_longest

import numpy as np

from envhub.recording.film import Film
from envhub.recording.marks import SAME_STEP, Follower, StepMark, has
from envhub.recording.tape import BLOCKS, FEW, MANY, Block, TapeShape

Note = int | str  # the seed of an episode, or the text of a failure


class StepOutcome(IntFlag):
    """The part of a step in an episode; none where it is 0."""

    BEGIN = 1  # the observation is the first one of an episode
    STEP = 2  # action, reward, flags and the observation after them
    TERMINATED = 4  # the step is the last one of its episode, as its flags say
    TRUNCATED = 8
    FAILED = 16  # the env failed in this step, which is the last one
    FINAL = 32  # the step's observation is in ``finals``; the one in ``observations`` belongs to the next episode
    CUT = 64  # the episode ended before this step, without a last one: by a reset, or the end of the session
    ABORT = 128  # the episode that was under way is not recorded after all


LAST = StepOutcome.TERMINATED | StepOutcome.TRUNCATED | StepOutcome.FAILED


@dataclass
class Episode:
    """The steps of one env from a reset on.

    Attributes:
        env_id: of the session.
        seed: that the reset was given, if any.
        observations: for each leaf the parts of its column, which has one entry more than there are steps.
        actions: for each leaf the parts of its column.
        rewards: the parts of the column.
        last: the outcome of its last step, the only one with flags; 0 for one that was cut or dropped.
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
        terminations[-1] = self.last & StepOutcome.TERMINATED
        truncations[-1] = self.last & StepOutcome.TRUNCATED or not terminations[-1]
        return terminations, truncations


class EpisodeCutter:
    """Follows each env of a tape from block to block.

    How many envs are recorded at a time follows from how many blocks were left to the program when it took one. If they
    were few, half of the episodes under way are dropped, and as many fewer begin; if they were many, one more.

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
        self._has_finals = shape.mode == SAME_STEP
        self._follower = Follower(shape.places, shape.mode)
        self._running: list[Episode | None] = [None] * shape.places
        self._since, self._begun = [0] * shape.places, 0  # the numbers of the episodes under way, in their order
        self._count, self._limit = 0, shape.places  # of the episodes under way

    @property
    def running(self) -> list[Episode]:
        """The episodes under way."""
        return [episode for episode in self._running if episode is not None]

    def drop_smallest(self) -> Episode:
        """The episode under way that has the fewest bytes, which ends here as ``"dropped"``.

        From now on no more envs are recorded at a time than are left, until that grows as the class says. Were the
        largest one dropped, long episodes would be recorded more rarely than short ones.
        """
        _, place = min((episode.nbytes, place) for place, episode in enumerate(self._running) if episode is not None)
        self._limit = max(1, self._count - 1)
        return self._end(place, "dropped")

    def take(
        self, block: Block, steps: int, notes: Mapping[tuple[int, int], Note], left: int = BLOCKS
    ) -> Iterator[Episode]:
        """Each episode that ends in these steps.

        ``notes`` has by step and place the seed of an episode that begins there, or the text of a failure. ``left`` is
        the number of blocks that the program had.
        """
        if left < FEW:
            yield from self._shed()
        elif left >= MANY:
            self._limit = min(len(self._running), self._limit + 1)
        yield from self.cut(block, self._outcomes(block, steps), notes)

    def cut(self, block: Block, outcomes: np.ndarray, notes: Mapping[tuple[int, int], Note]) -> Iterator[Episode]:
        """Take episodes as ``take`` does, of steps with these outcomes by place."""
        for place in np.flatnonzero(outcomes.any(axis=0)).tolist():
            at = 0
            for step, outcome, note in self._events(outcomes[:, place], place, notes):
                self._extend(block, place, _steps(outcomes[:, place], at, step))
                yield from self._event(block, place, step, StepOutcome(outcome), note)
                at = step + 1
            self._extend(block, place, _steps(outcomes[:, place], at, len(outcomes)))

    def _shed(self) -> Iterator[Episode]:
        """Drop the half of the episodes under way that began last, and let as many fewer begin."""
        places = [place for place, episode in enumerate(self._running) if episode is not None]
        self._limit = max(1, min(self._limit, len(places)) // 2)
        for place in sorted(places, key=self._since.__getitem__)[self._limit :]:
            yield self._end(place, "dropped")

    def _outcomes(self, block: Block, steps: int) -> np.ndarray:
        """Outcomes of these steps for the episode of each env, as uint8."""
        marks = block.marks[:steps]
        # Whatever the code of an env has made of its worker's tape: a byte that is neither 0 nor 1 is true.
        terminated, truncated = (flags[:steps].view(np.uint8) != 0 for flags in (block.terminations, block.truncations))
        begins, stepped = self._follower.follow(marks, terminated | truncated)
        outcomes: np.ndarray = np.uint8(StepOutcome.STEP) * stepped
        for outcome, where in (
            (StepOutcome.BEGIN, begins & ~has(marks, StepMark.SKIP)),
            (StepOutcome.TERMINATED, terminated & stepped),
            (StepOutcome.TRUNCATED, truncated & stepped),
            (StepOutcome.FAILED, has(marks, StepMark.FAILED) & stepped),
            (StepOutcome.CUT, has(marks, StepMark.CUT | StepMark.RESET)),
            (StepOutcome.ABORT, has(marks, StepMark.ABORT)),
        ):
            outcomes |= np.uint8(outcome) * where
        if self._has_finals:
            outcomes |= np.uint8(StepOutcome.FINAL) * (
                (terminated | truncated) & stepped & ~has(marks, StepMark.FAILED)
            )
        return outcomes

    def _events(
        self, outcomes: np.ndarray, place: int, notes: Mapping[tuple[int, int], Note]
    ) -> Iterator[tuple[int, int, Note | None]]:
        """Each step with which an episode begins or ends, its outcome, and what was said of it."""
        steps = np.flatnonzero(outcomes & ~np.uint8(StepOutcome.STEP)).tolist()
        events = [(step, int(outcomes[step]), notes.get((step, place))) for step in steps]
        if not self._failed_only:
            yield from events
            return
        runs = self._running[place] is not None
        for (step, outcome, note), following in zip_longest(events, events[1:]):
            ends, runs = runs, False
            if outcome & StepOutcome.BEGIN:
                runs = following is None or bool(following[1] & StepOutcome.FAILED) or isinstance(following[2], str)
                outcome = outcome if runs else outcome & ~StepOutcome.BEGIN
            if ends or runs:
                yield step, outcome, note

    def _event(self, block: Block, place: int, step: int, outcome: StepOutcome, note: Note | None) -> Iterator[Episode]:
        if self._running[place] is not None:
            failure = note if isinstance(note, str) else ""
            if outcome & StepOutcome.ABORT:
                yield self._end(place, "dropped")
            elif outcome & StepOutcome.CUT:
                yield self._end(place, "failed" if failure else "cut", failure)
            elif outcome & StepOutcome.STEP:
                self._extend(block, place, slice(step, step + 1), finals=bool(outcome & StepOutcome.FINAL))
                if outcome & LAST:
                    flagged = "terminated" if outcome & StepOutcome.TERMINATED else "truncated"
                    yield self._end(place, "failed" if outcome & StepOutcome.FAILED else flagged, failure, outcome)
        if outcome & StepOutcome.BEGIN:
            seed = note if isinstance(note, int) else None
            first = [leaf[step : step + 1, place].copy() for leaf in block.observations]
            begun = Episode(self._env_ids[place], seed, [[part] for part in first], [[] for _ in block.actions])
            begun.nbytes = sum(part.nbytes for part in first)
            self._running[place] = begun
            self._begun += 1
            self._count += 1
            self._since[place] = self._begun
            if self._count <= self._limit:
                self._film(block, place, begun, slice(step, step + 1))
            else:
                yield self._end(place, "dropped")

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

    def cut_all(self, failure: str = "", missing: bool = False) -> Iterator[Episode]:
        """Every episode under way, which ends here, by this failure if there is one; dropped if steps are missing."""
        how = "dropped" if missing else "failed" if failure else "cut"
        for place, episode in enumerate(self._running):
            if episode is not None:
                yield self._end(place, how, failure)

    def _end(self, place: int, how: str, failure: str = "", outcome: int = 0) -> Episode:
        episode, self._running[place] = self._running[place], None
        assert episode is not None
        self._count -= 1
        episode.ended, episode.failure, episode.last = how, failure, outcome
        return episode


def _steps(outcomes: np.ndarray, start: int, stop: int) -> slice | np.ndarray:
    """The steps from ``start`` to ``stop`` in which the env was stepped; in others, only other envs were reset."""
    steps: np.ndarray = np.flatnonzero(outcomes[start:stop] == StepOutcome.STEP) + start
    return slice(start, stop) if len(steps) == stop - start else steps
