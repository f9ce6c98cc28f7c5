"""Whole episodes, cut out of batches of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from envhub.film import Film
from envhub_client.recording.batches import StepBatch, StepMark

NEXT_STEP, SAME_STEP = "NextStep", "SameStep"

Note = int | str  # the seed of an episode, the text of a failure, or the number of episodes that were missed


@dataclass
class Episode:
    """The steps of one env from a reset on.

    Attributes:
        env_id: of the session.
        seed: that the reset was given, if any.
        observations: for each leaf the parts of its column, which has one entry more than there are steps.
        actions: for each leaf the parts of its column.
        rewards: the parts of the column.
        ended: ``"terminated"``, ``"truncated"``, ``"failed"``, ``"cut"`` by a reset or the end of the session, or
            ``"dropped"``; empty as long as it is under way.
        flags: the last step's.
        failure: the text of the env's failure.
        nbytes: of all parts.
        film: of it, if it is filmed.
    """

    env_id: int
    seed: int | None
    observations: list[list[np.ndarray]]
    actions: list[list[np.ndarray]]
    rewards: list[np.ndarray] = field(default_factory=list)
    ended: str = ""
    flags: tuple[bool, bool] = (False, False)
    failure: str = ""
    steps: int = 0
    nbytes: int = 0
    film: Film | None = None


class EpisodeCourse:
    """The course of one env: which of its steps begin and end episodes, of which every n-th is recorded.

    Attributes:
        begun: how many episodes have begun.
        under_way: whether one that is recorded is under way.
        shows: whether the last step that was followed shows something of an episode that is recorded.
    """

    def __init__(self, mode: str, every: int) -> None:
        self._mode, self._every = mode, every
        self.begun = 0
        self.under_way = self.shows = False
        self.resets_next = False  # whether the next step is the reset after an episode

    def follow(self, mark: int, ended: bool) -> tuple[bool, bool, bool]:
        """Follow a step with this mark, in which a flag is set if it ``ended`` an episode.

        Returns:
            Whether the episode under way ended before it, whether the step is of this episode, and whether the next
            episode begins with it.
        """
        self.shows = False
        if mark == StepMark.STILL:
            return False, False, False
        cuts = steps = begins = False
        if mark in (StepMark.RESET, StepMark.BROKEN_OFF, StepMark.MISSED):
            cuts, begins, self.resets_next = self.under_way, mark == StepMark.RESET, False
        elif self.resets_next:
            begins = mark != StepMark.FAILED
            self.resets_next = not begins
        else:
            failed = mark == StepMark.FAILED
            over, steps = ended or failed, self.under_way
            self.resets_next = over if self._mode == NEXT_STEP else failed if self._mode == SAME_STEP else False
            begins = self._mode == SAME_STEP and ended and not failed
            self.shows = steps and not begins
            self.under_way = steps and not over
        if cuts:
            self.under_way = False
        if begins:
            self.under_way = begins = self.begun % self._every == 0
            self.begun += 1
        self.shows = self.shows or begins
        return cuts, steps, begins

    def miss(self, count: int) -> int:
        """Count episodes that began in steps that were missed; returns how many of them were to be recorded."""
        before, self.begun = self.begun, self.begun + count
        return -(-self.begun // self._every) - -(-before // self._every)


class EpisodeCutter:
    """Follows the recorded envs from batch to batch.

    Args:
        env_ids: the env of each row.
        mode: the autoreset mode.
        every: n, for every n-th episode of each env.
        film_of: the place among a step's frames of each row that is filmed.
        on_frames: called with an episode and its next frames.

    Attributes:
        dropped: how many episodes began, and may have ended, in steps that were missed.
    """

    def __init__(
        self,
        env_ids: Sequence[int],
        mode: str,
        every: int,
        film_of: Mapping[int, int],
        on_frames: Callable[[Episode, np.ndarray], None],
    ) -> None:
        self._env_ids, self._film_of, self._on_frames = env_ids, film_of, on_frames
        self._courses = [EpisodeCourse(mode, every) for _ in env_ids]
        self._under_way: dict[int, Episode] = {}  # by row
        self.dropped = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the episodes under way."""
        return sum(episode.nbytes for episode in self._under_way.values())

    def take(self, batch: StepBatch, steps: int, notes: Mapping[tuple[int, int], Note]) -> list[Episode]:
        """Each episode that ends in these steps; ``notes`` are by step and row."""
        ended: list[Episode] = []
        flags = batch.terminations[:steps] | batch.truncations[:steps]
        special = flags | (batch.marks[:steps] != StepMark.STEPPED)
        special[1:] |= special[:-1]  # the step after an episode may be a reset
        special[:1] = True
        for row, course in enumerate(self._courses):
            at = 0
            for step in np.flatnonzero(special[:, row]).tolist():
                self._extend(batch, row, slice(at, step))
                at = step + 1
                mark, note = int(batch.marks[step, row]), notes.get((step, row))
                resets_next = course.resets_next
                cuts, is_step, begins = course.follow(mark, bool(flags[step, row]))
                if mark == StepMark.MISSED:
                    self.miss(row, int(note or 0) + resets_next)
                failure = note if isinstance(note, str) else ""
                if cuts:
                    how = "dropped" if mark == StepMark.MISSED else "failed" if failure else "cut"
                    ended.append(self._end(row, how, failure))
                if is_step:
                    self._extend(
                        batch, row, slice(step, at), is_final=bool(flags[step, row]) and mark != StepMark.FAILED
                    )
                    if begins or not course.under_way:
                        self._under_way[row].flags = batch.terminations[step, row], batch.truncations[step, row]
                        flagged = "terminated" if batch.terminations[step, row] else "truncated"
                        ended.append(self._end(row, "failed" if mark == StepMark.FAILED else flagged, failure))
                if begins:
                    self._begin(batch, row, step, note if isinstance(note, int) else None)
            self._extend(batch, row, slice(at, steps))
        return ended

    def miss(self, row: int, count: int) -> None:
        """Count episodes of this row that began in steps that were missed."""
        self.dropped += self._courses[row].miss(count)

    def drop_smallest(self) -> Episode:
        """Drop the episode under way with the fewest bytes: else long ones would be recorded more rarely."""
        row = min(self._under_way, key=lambda each: self._under_way[each].nbytes)
        self._courses[row].under_way = False
        return self._end(row, "dropped")

    def end_all(self, how: str) -> list[Episode]:
        """Every episode under way, which ends here."""
        return [self._end(row, how) for row in [*self._under_way]]

    def _begin(self, batch: StepBatch, row: int, step: int, seed: int | None) -> None:
        first = [[column[step : step + 1, row].copy()] for column in batch.observations]
        episode = Episode(self._env_ids[row], seed, first, [[] for _ in batch.actions])
        episode.nbytes = sum(part.nbytes for (part,) in first)
        self._under_way[row] = episode
        self._film(batch, row, episode, slice(step, step + 1))

    def _extend(self, batch: StepBatch, row: int, steps: slice, is_final: bool = False) -> None:
        """Add steps of one env, if an episode of it is under way; a last one may be in ``finals``, and has no frame."""
        episode = self._under_way.get(row)
        if episode is None or steps.start == steps.stop:
            return
        shown = (is_final and batch.finals) or batch.observations
        for parts, column in (
            *zip(episode.observations, shown, strict=True),
            *zip(episode.actions, batch.actions, strict=True),
            (episode.rewards, batch.rewards),
        ):
            parts.append(column[steps, row].copy())
            episode.nbytes += parts[-1].nbytes
        episode.steps += steps.stop - steps.start
        if shown is batch.observations:
            self._film(batch, row, episode, steps)

    def _film(self, batch: StepBatch, row: int, episode: Episode, steps: slice) -> None:
        if row in self._film_of:
            self._on_frames(episode, batch.frames[steps, self._film_of[row]])

    def _end(self, row: int, how: str, failure: str = "") -> Episode:
        episode = self._under_way.pop(row)
        episode.ended, episode.failure = how, failure
        return episode
