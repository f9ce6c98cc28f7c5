"""The half of a recording that sees the envs: it writes what each step brought into a tape, and hands over full blocks.

A step costs a few copies of arrays and waits for nothing: the process that writes finds out which episodes begin and
end in it. Where that has not given a block back, steps are missed, and their episodes dropped. Runs on Python 3.8 and
later, in workers too.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from envhub.recording.episode_choice import EpisodeChoice
from envhub.recording.marks import EXPLICIT, SAME_STEP, StepMark
from envhub.recording.tape import TapeShape, is_frame, steps_of
from envhub.recording.tape_writer import TapeWriter
from envhub.values import spaces

START_S = 60.0  # for the process that writes to import what it needs
NOTE_CHARACTERS = 300
WHOLE_STEP_BYTES = 1 << 16  # up to which copying all envs is quicker than choosing

log = logging.getLogger("envhub")


class Selection(NamedTuple):
    """The part of a batch of envs that is recorded.

    Attributes:
        num_envs: of the batch.
        recorded: the envs that are, ascending, by their places in the batch.
        filmed: those of them that are also filmed, ascending.
        every: of each env every n-th episode, beginning with its first.
        numbers: of the recorded ones in their session; None for their places in the batch.
    """

    num_envs: int
    recorded: Sequence[int]
    filmed: Sequence[int] = ()
    every: int = 1
    numbers: Sequence[int] | None = None


class Moves(NamedTuple):
    """Marks of a step for each env of a batch, where they do not follow from the steps before.

    Attributes:
        stepped: which envs moved; None for all.
        reset: the envs, ascending, that were reset in the step because their episode had ended or they are new; None
            for none.
        failed: what is said of each env that gave no result.
        seeds: of these resets, by env, as far as they have one.
    """

    stepped: np.ndarray | None
    reset: Sequence[int] | None
    failed: Mapping[int, str] = {}
    seeds: Mapping[int, int | None] = {}


class EpisodeRecorder:
    """Records one batch of envs.

    Args:
        line: to the process that writes, a SEQPACKET socket; ``close`` closes it.
        selection: what is recorded.
        spaces_of_one: of observations and of actions, of one env.
        mode: the autoreset mode.
        queue_bytes: of the tape.
        begun: how many episodes of each env of the session have begun, which is kept up to date where not every episode
            is recorded; None for none.

    Attributes:
        tape: the tape that is written.
        frames_due: the envs of which ``add_frames`` is to be given frames before anything else is reported.
    """

    def __init__(
        self,
        line: socket.socket,
        selection: Selection,
        spaces_of_one: tuple[Any, Any],
        mode: str,
        queue_bytes: int,
        begun: np.ndarray | None = None,
    ) -> None:
        self._spaces, self._mode, self._queue_bytes = spaces_of_one, mode, queue_bytes
        self._envs, self._films = list(selection.recorded), list(selection.filmed)
        places = len(self._envs)
        self._chosen = None if places == selection.num_envs else np.array(self._envs)
        numbers = np.array(self._envs if selection.numbers is None else selection.numbers, np.int64)
        self._choice = EpisodeChoice(numbers, mode, selection.every, begun)
        self._chooses = selection.every > 1 or bool(self._films)
        self.tape = TapeWriter(line, self._lost)
        self._no_flags = np.zeros(places), np.zeros(places, bool), np.zeros(places, bool)
        self._next_marks: bytearray | None = None  # which the next step that is written gets besides its own
        self._failed_before: Sequence[int] = ()  # places whose envs failed in the step before
        self.frames_due: list[int] = []

    @property
    def records(self) -> bool:
        """True if steps are recorded: from ``open`` on until something ends it."""
        return self.tape.records

    @property
    def opened(self) -> bool:
        """True if there is a tape, or was."""
        return self.tape.opened

    @property
    def closed(self) -> bool:
        """True if nothing is recorded any more."""
        return self.tape.closed

    @property
    def dropped(self) -> int:
        """Number of episodes that began in steps that were missed; the process that writes counts others."""
        return self._choice.dropped

    def open(self, frame: tuple[int, ...] = (), wait_s: float = START_S) -> None:
        """Make the tape, and wait for up to ``wait_s`` for the process that writes.

        Frames have this shape; if that is none of ``(height, width, 3)``, nothing is filmed.

        Raises:
            OSError: there is no memory.
        """
        leaves = [spaces.leaves(space) for space in self._spaces]
        observations, actions = ([leaf.wire() for leaf in each] for each in leaves)
        if self._films and not is_frame(frame):
            log.warning("nothing is filmed: frames are to be (height, width, 3), and these are %s", frame)
            self._films, frame = [], ()
        shape = TapeShape(len(self._envs), 1, observations, actions, self._mode, frame, len(self._films))
        shape = replace(shape, steps=steps_of(shape, self._queue_bytes))
        self._whole = [len(self._envs) * leaf.nbytes <= WHOLE_STEP_BYTES for leaf in leaves[0]]
        self._all_whole = all(self._whole)
        self.tape.open(shape, wait_s)

    # --- what the vector env reports ----------------------------------------------------------------------------------

    def reset(
        self,
        mask: np.ndarray | None,
        seeds: Sequence[int | None] | None,
        leaves: Sequence[np.ndarray],
        frame: tuple[int, ...] = (),
    ) -> None:
        """Every env, or those of the mask, was reset and shows these observations; films have frames of this shape."""
        if not self.opened and not self.closed:
            self.open(frame)
        if not self.records:
            return
        self._has_room()
        self._failed_before = ()
        marks = bytearray([StepMark.STILL]) * len(self._envs)
        for place in range(len(marks)) if mask is None else np.flatnonzero(self._of_chosen(mask)).tolist():
            marks[place] = StepMark.RESET
            self.tape.note(place, seeds[self._envs[place]] if seeds else None)
        self._write(self._with_next_marks(marks), self._no_flags, leaves)

    def acted(self, leaves: Sequence[Any]) -> None:
        """A step with these actions begins: an array or a list for each leaf of the action space."""
        tape = self.tape
        if not tape.records or not (tape.at < tape.end or self._has_room()):
            return
        assert tape.block is not None
        try:
            for column, leaf in zip(tape.block.actions, leaves):
                column[tape.at] = leaf if self._chosen is None else np.asarray(leaf)[self._chosen]
        except (ValueError, TypeError) as error:  # of a form that envs understand, and their space does not
            self._miss_what_is_under_way()
            log.warning("actions cannot be recorded: %s", error)

    def stepped(
        self,
        leaves: Sequence[np.ndarray],
        flags: Sequence[np.ndarray],
        infos: Mapping[Any, Any],
        moves: Moves | None = None,
        last: bool = False,
    ) -> None:
        """The step brought these observations, rewards, terminations and truncations, and infos, batched or by env.

        Without ``moves`` every env moved, and was reset where its autoreset mode says so: in NEXT_STEP after the end of
        its episode, in SAME_STEP after a failure.
        The ``last`` step only ends episodes: those that begin with it belong to another recorder of these envs.
        """
        if not self.tape.records:
            return
        if moves is not None:
            self.failed(moves.failed)
        if self.tape.at == self.tape.end:
            self._has_room()
        if self._chosen is not None:
            flags = [*map(self._of_chosen, flags)]
        marks = None
        if infos or moves is not None or last or self._next_marks is not None:
            marks = self._marks(flags, infos, moves, last)
        else:
            self._failed_before = ()
        self._write(marks, flags, leaves)

    def failed(self, failed: Mapping[int, str]) -> None:
        """The episodes of these envs ended without a result; what is said of them goes with the next step."""
        places = [self._envs.index(env) for env in failed if env in self._envs]
        if not places or not self.records:
            return
        self._mark_next(places, StepMark.CUT)
        if self._has_room():
            for place in places:
                self.tape.note(place, failed[self._envs[place]][:NOTE_CHARACTERS] or "failed")

    def add_frames(self, frames: Sequence[np.ndarray]) -> None:
        """The frames of ``frames_due``, uint8 ``(height, width, 3)``."""
        tape = self.tape
        assert tape.block is not None
        for env, frame in zip(self.frames_due, frames):
            tape.block.frames[tape.at, self._films.index(env)] = frame
        self.frames_due = []
        self._complete_step()

    def broke_off(self, failed: int | None = None, why: str = "") -> None:
        """A step or reset ended without a result, so that the envs may have moved unseen; this env failed."""
        if not self.records:
            return
        self._has_room()
        if failed in self._envs:
            self.tape.note(self._envs.index(failed), why[:NOTE_CHARACTERS] or "failed")
        marks = bytearray([StepMark.CUT | StepMark.STILL]) * len(self._envs)
        self._write(self._with_next_marks(marks), self._no_flags, ())

    def close(self) -> None:
        """Hand over what is complete, and close the line; nothing is recorded any more."""
        self.tape.close(lambda: self._pass_block(close=True))

    def _lost(self) -> None:
        """Handle the end of the process that writes."""

    # --- marks --------------------------------------------------------------------------------------------------------

    def _marks(
        self, flags: Sequence[np.ndarray], infos: Mapping[Any, Any], moves: Moves | None, last: bool
    ) -> bytearray | None:
        """Mark the envs in this step, and write its notes and finals; None if the step is an ordinary one."""
        marks = bytearray(len(self._envs)) if moves is None else self._moved(moves)
        failed = self._failed(infos) if infos else ()
        for place in failed:
            marks[place] |= StepMark.FAILED
            if place not in self._failed_before:  # else there was no episode since
                self.tape.note(place, _failure(infos, self._envs[place]))
        self._failed_before = failed
        if self._mode == SAME_STEP and infos:
            for place in np.flatnonzero(flags[1] | flags[2]).tolist():
                if not marks[place] & (StepMark.FAILED | StepMark.RESET | StepMark.STILL):
                    self._write_final(place, _final(infos, self._envs[place]))
        if last:
            marks = bytearray(mark | StepMark.LAST for mark in marks)
        if self._next_marks is not None:
            return self._with_next_marks(marks)
        return marks if failed or last or moves is not None else None

    def _moved(self, moves: Moves) -> bytearray:
        """The marks of these moves."""
        marks = bytearray([StepMark.STEPPED]) * len(self._envs)
        for env in moves.reset or ():
            if env in self._envs:
                place = self._envs.index(env)
                marks[place] = StepMark.RESET
                self.tape.note(place, moves.seeds.get(env))
        if moves.stepped is not None:
            for place in np.flatnonzero(~self._of_chosen(moves.stepped)).tolist():
                marks[place] = StepMark.STILL
        return marks

    def _failed(self, infos: Mapping[Any, Any]) -> list[int]:
        """The places whose envs failed in this step."""
        if "invalid_transition" in infos:
            failed = self._of_chosen(np.asarray(infos["invalid_transition"], bool))
            places: list[int] = np.flatnonzero(failed).tolist()
            return places
        if not _is_by_env(infos):
            return []
        envs = [env for env, info in infos.items() if info.get("invalid_transition")]
        return [self._envs.index(env) for env in envs if env in self._envs]

    def _mark_next(self, places: Sequence[int], mark: int) -> None:
        """Add the mark to the next step that is written."""
        if self._next_marks is None:
            self._next_marks = bytearray(len(self._envs))
        for place in places:
            self._next_marks[place] |= mark

    def _with_next_marks(self, marks: bytearray) -> bytearray:
        """Add the marks of ``_mark_next``, if there is room for a step.

        After steps that were missed only marks show the other process which envs are reset.
        """
        if self._next_marks is None or self.tape.at == self.tape.end:
            return marks
        expecting = self._choice.expecting.tolist()
        for place, added in enumerate(self._next_marks):
            if added & StepMark.ABORT and expecting[place] and marks[place] & ~StepMark.FAILED in (0, StepMark.STILL):
                marks[place] |= StepMark.RESET
            elif added & StepMark.ABORT and not marks[place] & EXPLICIT:
                marks[place] |= StepMark.STEPPED
            marks[place] |= added
        return marks

    def _miss_what_is_under_way(self) -> None:
        """Drop the episodes under way."""
        self._follow_up()
        self._mark_next(range(len(self._envs)), StepMark.ABORT)
        self.tape.note_missing(True)
        self._choice.give_up()

    def _of_chosen(self, batch: np.ndarray) -> np.ndarray:
        chosen: np.ndarray = batch if self._chosen is None else batch[self._chosen]
        return chosen

    # --- steps of the tape --------------------------------------------------------------------------------------------

    def _write(self, marks: bytearray | None, flags: Sequence[np.ndarray], leaves: Sequence[np.ndarray]) -> None:
        """Write a step, and complete it if no frames belong to it; where there is no room it is missed."""
        at, block = self.tape.at, self.tape.block
        if block is None or at == self.tape.end:
            row = np.frombuffer(marks or bytes(len(self._envs)), np.uint8)
            self._choice.miss(row, flags[1] | flags[2])
            return
        block.rewards[at], block.terminations[at], block.truncations[at] = flags
        shown: Sequence[int] | None = None
        if marks is not None:
            block.mark_bytes[at * len(marks) : (at + 1) * len(marks)] = marks
            if not self._all_whole:
                shown = [place for place, mark in enumerate(marks) if not mark & StepMark.STILL]
        if self._chooses:
            recorded, filmed = self._choice.choose(at, block.marks[at], flags[1] | flags[2])
            shown = np.flatnonzero(recorded).tolist()
            self.frames_due = [env for env in self._films if filmed[self._envs.index(env)]]
        for column, leaf, whole in zip(block.observations, leaves, self._whole):
            if whole or shown is None or len(shown) == len(self._envs):
                column[at] = leaf if self._chosen is None else leaf[self._chosen]
            else:
                for place in shown:
                    column[at, place] = leaf[self._envs[place]]
        if not self.frames_due:
            self._complete_step()

    def _complete_step(self) -> None:
        is_full = self.tape.complete_step()
        if self._next_marks is not None:
            self._next_marks = None
            self.tape.note_missing(False)
        if is_full:
            self._pass_block()

    def _write_final(self, place: int, observation: object) -> None:
        tape = self.tape
        if tape.block is None or tape.at == tape.end:
            return
        parts = spaces.flatten(self._spaces[0], observation)
        for column, part in zip(tape.block.finals, parts):
            column[tape.at, place] = part

    def _has_room(self) -> bool:
        """True if there is a block to write into; if there is none, all episodes under way are dropped."""
        if self.tape.block is not None:
            if self.tape.at < self.tape.end:
                return True
            self._pass_block()  # which the line had no room for before
        if self.tape.take_block():
            self._choice.begin_block()
            return True
        if self.records:
            self._miss_what_is_under_way()
        return False

    def _pass_block(self, close: bool = False) -> None:
        """Give the block to the process that writes, once its steps are followed."""
        self._follow_up()
        try:
            self.tape.pass_block(self._choice.dropped, close)
        except BaseException:  # Ctrl-C
            self._miss_what_is_under_way()
            raise

    def _follow_up(self) -> None:
        if self.tape.block is not None:
            self._choice.follow_up(self.tape.block, self.tape.at)


def _is_by_env(infos: Mapping[Any, Any]) -> bool:
    return isinstance(next(iter(infos), ""), int)


def _final(infos: Mapping[Any, Any], env: int) -> object:
    """The last observation of an episode that ended in the same step."""
    return infos[env]["final_obs"] if _is_by_env(infos) else infos["final_obs"][env]


def _failure(infos: Mapping[Any, Any], env: int) -> str:
    """Text of an env's failure."""
    failure = infos[env].get("env_failure") if _is_by_env(infos) else infos.get("env_failure", {env: None})[env]
    if failure is None:
        return "failed"
    return f"{failure.cause}: {failure.message}"[:NOTE_CHARACTERS]
