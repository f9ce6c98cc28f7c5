"""The half of a recording that sees the envs: it writes what each step brought into a tape, and hands over full blocks.

A step costs a few copies of arrays and waits for nothing: the process that writes finds out which episodes begin and
end in it. Where that has not given a block back, steps are missed, and their episodes dropped. Runs on Python 3.8 and
later, in workers too.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import time
from dataclasses import replace
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from envhub.recording.marks import KNOWN, SAME_STEP, Follower, StepMark, has
from envhub.recording.tape import BLOCKS, MANY, Block, TapeShape, is_frame, new_tape, steps_of
from envhub.values import codec, spaces

START_S = 60.0  # for the process that writes to import what it needs
CLOSE_S = 1.0  # for it to take the last block
HANDED_OVER_S = 1.0  # after this long a block is handed over though it is not full
MESSAGE_BYTES_MAX = 1 << 16
NOTES_BYTES_MAX = 1 << 16  # of a block: seeds, and what was said of failures
NOTE_BYTES = 20  # of the numbers of a note
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
        records: whether steps are recorded: from ``open`` on until something ends it.
        dropped: how many episodes began in steps that were missed; the process counts others.
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
        self._line, self._spaces, self._mode, self._queue_bytes = line, spaces_of_one, mode, queue_bytes
        self._num_envs, self._every = selection.num_envs, selection.every
        self._envs, self._films = list(selection.recorded), list(selection.filmed)
        self._chosen = None if len(self._envs) == self._num_envs else np.array(self._envs)
        places = len(self._envs)
        self._ids = np.array(self._envs if selection.numbers is None else selection.numbers, np.int64)
        self._begun = np.zeros(int(self._ids.max(initial=0)) + 1, np.int64) if begun is None else begun
        self._follower, self._followed = Follower(places, mode), 0  # the steps of the block that it has followed
        self._wanted = np.zeros(places, bool)  # the episodes under way that ``every`` chooses, if each step is followed
        self._no_flags = np.zeros(places), np.zeros(places, bool), np.zeros(places, bool)
        self._owed: bytearray | None = None  # marks for the next step that is written
        self._failed_before: Sequence[int] = ()  # places whose envs failed in the step before
        self.frames_due: list[int] = []
        self._block: Block | None = None
        self._number, self._at, self._end, self._due = -1, 0, 0, 0.0  # steps of the block: written, and in all
        self._free, self._left = [*range(BLOCKS)], BLOCKS  # blocks, and how many were left when this one was taken
        self._notes: list[tuple[int, int, Any]] = []
        self._note_bytes = 0
        self.dropped = 0
        self.counts: dict[str, Any] = {"episodes": 0, "nbytes": 0, "dropped": 0, "ended": ""}
        self.records = self.opened = self.closed = False

    def open(self, frame: tuple[int, ...] = (), wait_s: float = START_S) -> None:
        """Make the tape, and wait for up to ``wait_s`` for the process that writes.

        Frames have this shape; if that is none of ``(height, width, 3)``, nothing is filmed.

        Raises:
            OSError: there is no memory.
        """
        observations, actions = ([leaf.wire() for leaf in spaces.leaves(space)] for space in self._spaces)
        if self._films and not is_frame(frame):
            log.warning("nothing is filmed: frames are to be (height, width, 3), and these are %s", frame)
            self._films, frame = [], ()
        shape = TapeShape(len(self._envs), 1, observations, actions, self._mode, frame, len(self._films))
        shape = replace(shape, steps=steps_of(shape, self._queue_bytes))
        self._tape, descriptor = new_tape(shape)
        self._whole = [leaf[0].nbytes <= WHOLE_STEP_BYTES for leaf in self._tape.blocks[0].observations]
        self._all_whole = all(self._whole)
        self._follows = self._every > 1 or bool(self._films)
        self.records = self.opened = True
        rights = array.array("i", [descriptor]).tobytes()
        try:
            message = codec.encode({"shape": shape.wire()})
            self._line.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError as error:
            self._lose(error)
        finally:
            os.close(descriptor)
        if not self.closed:
            self.read_answers(wait_s)

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
            self._note(place, seeds[self._envs[place]] if seeds else None)
        self._write(self._with_owed(marks), self._no_flags, leaves)

    def acted(self, leaves: Sequence[Any]) -> None:
        """A step with these actions begins: an array or a list for each leaf of the action space."""
        if not self.records or not (self._at < self._end or self._has_room()):
            return
        assert self._block is not None
        try:
            for column, leaf in zip(self._block.actions, leaves):
                column[self._at] = leaf if self._chosen is None else np.asarray(leaf)[self._chosen]
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
        if not self.records:
            return
        if moves is not None:
            self.failed(moves.failed)
        if self._at == self._end:
            self._has_room()
        if self._chosen is not None:
            flags = [*map(self._of_chosen, flags)]
        marks = None
        if infos or moves is not None or last or self._owed is not None:
            marks = self._marks(flags, infos, moves, last)
        else:
            self._failed_before = ()
        self._write(marks, flags, leaves)

    def failed(self, failed: Mapping[int, str]) -> None:
        """The episodes of these envs ended without a result; what is said of them goes with the next step."""
        places = [self._envs.index(env) for env in failed if env in self._envs]
        if not places or not self.records:
            return
        self._owe(places, StepMark.CUT)
        if self._has_room():
            for place in places:
                self._note(place, failed[self._envs[place]][:NOTE_CHARACTERS] or "failed")

    def add_frames(self, frames: Sequence[np.ndarray]) -> None:
        """The frames of ``frames_due``, uint8 ``(height, width, 3)``."""
        assert self._block is not None
        for env, frame in zip(self.frames_due, frames):
            self._block.frames[self._at, self._films.index(env)] = frame
        self.frames_due = []
        self._complete_step()

    def broke_off(self, failed: int | None = None, why: str = "") -> None:
        """A step or reset ended without a result, so that the envs may have moved unseen; this env failed."""
        if not self.records:
            return
        self._has_room()
        if failed in self._envs:
            self._note(self._envs.index(failed), why[:NOTE_CHARACTERS] or "failed")
        marks = bytearray([StepMark.CUT | StepMark.STILL]) * len(self._envs)
        self._write(self._with_owed(marks), self._no_flags, ())

    def close(self) -> None:
        """Hand over what is complete, and close the line; nothing is recorded any more."""
        if self._line.fileno() < 0:
            return
        if self.opened and not self.closed:
            self._line.settimeout(CLOSE_S)
            self._hand_over(close=True)
        self.records, self.closed = False, True
        self._line.close()

    # --- what is out of the ordinary ----------------------------------------------------------------------------------

    def _marks(
        self, flags: Sequence[np.ndarray], infos: Mapping[Any, Any], moves: Moves | None, last: bool
    ) -> bytearray | None:
        """Mark the envs in this step, and write its notes and finals; None if the step is an ordinary one."""
        marks = bytearray(len(self._envs)) if moves is None else self._moved(moves)
        failed = self._failed(infos) if infos else ()
        for place in failed:
            marks[place] |= StepMark.FAILED
            if place not in self._failed_before:  # else there was no episode since
                self._note(place, _failure(infos, self._envs[place]))
        self._failed_before = failed
        if self._mode == SAME_STEP and infos:
            for place in np.flatnonzero(flags[1] | flags[2]).tolist():
                if not marks[place] & (StepMark.FAILED | StepMark.RESET | StepMark.STILL):
                    self._write_final(place, _final(infos, self._envs[place]))
        if last:
            marks = bytearray(mark | StepMark.LAST for mark in marks)
        if self._owed is not None:
            return self._with_owed(marks)
        return marks if failed or last or moves is not None else None

    def _moved(self, moves: Moves) -> bytearray:
        """The marks by which these are known."""
        marks = bytearray([StepMark.STEPPED]) * len(self._envs)
        for env in moves.reset or ():
            if env in self._envs:
                place = self._envs.index(env)
                marks[place] = StepMark.RESET
                self._note(place, moves.seeds.get(env))
        if moves.stepped is not None:
            for place in np.flatnonzero(~self._of_chosen(moves.stepped)).tolist():
                marks[place] = StepMark.STILL
        return marks

    def _failed(self, infos: Mapping[Any, Any]) -> list[int]:
        """The places whose envs failed in this step."""
        if "invalid_transition" in infos:
            found: list[int] = np.flatnonzero(self._of_chosen(np.asarray(infos["invalid_transition"], bool))).tolist()
            return found
        if not _is_by_env(infos):
            return []
        failed = [env for env, info in infos.items() if info.get("invalid_transition")]
        return [self._envs.index(env) for env in failed if env in self._envs]

    def _owe(self, places: Sequence[int], mark: int) -> None:
        """Add the mark to the next step that is written."""
        if self._owed is None:
            self._owed = bytearray(len(self._envs))
        for place in places:
            self._owed[place] |= mark

    def _with_owed(self, marks: bytearray) -> bytearray:
        """These marks and those that are owed, if there is room for a step.

        After steps that were missed the other process knows which envs are reset only if it is told.
        """
        if self._owed is None or self._at == self._end:
            return marks
        expecting = self._follower.expecting.tolist()
        for place, owed in enumerate(self._owed):
            if owed & StepMark.ABORT and expecting[place] and marks[place] & ~StepMark.FAILED in (0, StepMark.STILL):
                marks[place] |= StepMark.RESET
            elif owed & StepMark.ABORT and not marks[place] & KNOWN:
                marks[place] |= StepMark.STEPPED
            marks[place] |= owed
        return marks

    def _miss_what_is_under_way(self) -> None:
        """Do not record the episodes under way after all."""
        self._follow_up()
        self._owe(range(len(self._envs)), StepMark.ABORT)
        self._tape.words[2] = 1
        self._wanted[:] = False

    def _of_chosen(self, batch: np.ndarray) -> np.ndarray:
        chosen: np.ndarray = batch if self._chosen is None else batch[self._chosen]
        return chosen

    # --- which episodes -----------------------------------------------------------------------------------------------

    def _follow_up(self) -> None:
        """Know which envs are to be reset after the steps of the block."""
        if self._block is not None and self._followed < self._at:
            block, last = self._block, self._at - 1
            # The last step decides about the next one, where nobody was still in it.
            steps = slice(self._followed if block.marks[last].any() else last, self._at)
            self._follower.follow(block.marks[steps], block.terminations[steps] | block.truncations[steps])
            self._followed = self._at

    def _follow(self, marks: np.ndarray, ended: np.ndarray) -> list[int]:
        """Mark those episodes that begin in this step and are not wanted; returns the places that show something."""
        before = self._wanted & ~has(marks, StepMark.CUT | StepMark.ABORT | StepMark.RESET)
        begins, stepped = (row[0] for row in self._follower.follow(marks[None], ended[None]))
        self._followed = self._at + 1
        ends = stepped & (ended | has(marks, StepMark.FAILED))
        wanted = self._count(begins)
        marks[begins & ~wanted] |= np.uint8(StepMark.SKIP)
        self._wanted = np.where(begins, wanted, before & ~ends)
        shown = stepped & before
        if self._films:
            final = ends & ~has(marks, StepMark.FAILED) if self._mode == SAME_STEP else np.zeros_like(ends)
            filmed = ((shown & ~final) | wanted).tolist()
            self.frames_due = [env for env in self._films if filmed[self._envs.index(env)]]
        found: list[int] = np.flatnonzero(shown | wanted).tolist()
        return found

    def _count(self, begins: np.ndarray) -> np.ndarray:
        """Count the episodes that begin; returns those that are wanted."""
        if self._every == 1:
            return begins
        wanted: np.ndarray = begins.copy()
        ids = self._ids[begins]
        wanted[begins] = self._begun[ids] % self._every == 0
        self._begun[ids] += 1
        return wanted

    # --- the tape -----------------------------------------------------------------------------------------------------

    def _write(self, marks: bytearray | None, flags: Sequence[np.ndarray], leaves: Sequence[np.ndarray]) -> None:
        """Write a step, and complete it if no frames belong to it; where there is no room it is missed."""
        at, block = self._at, self._block
        if block is None or at == self._end:
            self._miss(marks, flags)
            return
        block.rewards[at], block.terminations[at], block.truncations[at] = flags
        shown: Sequence[int] | None = None
        if marks is not None:
            block.mark_bytes[at * len(marks) : (at + 1) * len(marks)] = marks
            if not self._all_whole:
                shown = [place for place, mark in enumerate(marks) if not mark & StepMark.STILL]
        if self._follows:
            shown = self._follow(block.marks[at], flags[1] | flags[2])
        for column, leaf, whole in zip(block.observations, leaves, self._whole):
            if whole or shown is None or len(shown) == len(self._envs):
                column[at] = leaf if self._chosen is None else leaf[self._chosen]
            else:
                for place in shown:
                    column[at, place] = leaf[self._envs[place]]
        if not self.frames_due:
            self._complete_step()

    def _miss(self, marks: bytearray | None, flags: Sequence[np.ndarray]) -> None:
        """Count the episodes that begin in this step."""
        row = np.frombuffer(marks or bytes(len(self._envs)), np.uint8)
        begins, _ = self._follower.follow(row[None], (flags[1] | flags[2])[None])
        self.dropped += int(np.count_nonzero(self._count(begins[0])))

    def _complete_step(self) -> None:
        self._at = self._tape.words[1] = self._at + 1
        if self._owed is not None:
            self._owed = None
            self._tape.words[2] = 0
        # Notes are not in the tape, and are lost if this process is killed. Where few blocks are free they wait.
        noted = self._notes and len(self._free) >= MANY
        if noted or self._at == self._end or time.monotonic() > self._due:
            self._hand_over()

    def _write_final(self, place: int, observation: Any) -> None:
        if self._block is None or self._at == self._end:
            return
        parts = spaces.flatten(self._spaces[0], observation)
        for column, part in zip(self._block.finals, parts):
            column[self._at, place] = part

    def _note(self, place: int, note: Any) -> None:
        """Say this of the env in the step that is written next, if there is room."""
        nbytes = NOTE_BYTES + (len(note.encode()) if isinstance(note, str) else 0)
        if note is not None and self._at < self._end and self._note_bytes + nbytes <= NOTES_BYTES_MAX:
            self._note_bytes += nbytes
            self._notes.append((self._at, place, note))

    def _has_room(self) -> bool:
        """True if there is a block to write into; if there is none, all episodes under way are dropped."""
        if self._block is not None:
            if self._at < self._end:
                return True
            self._hand_over()  # which the line had no room for before
        self.read_answers()
        if self._block is None and self._free and self.records:
            self._number = self._free.pop()
            self._block, self._at, self._end = self._tape.blocks[self._number], 0, self._tape.shape.steps
            self._block.marks[:] = 0
            self._followed, self._left = 0, len(self._free)
            self._due = time.monotonic() + HANDED_OVER_S
            self._tape.begin(self._number)
            return True
        if self.records:
            self._miss_what_is_under_way()
        return False

    # --- the other process --------------------------------------------------------------------------------------------

    def _hand_over(self, close: bool = False) -> None:
        """Give the block to the other process, which gives it back when it has read it."""
        order = {
            "block": max(0, self._number),
            "steps": self._at if self._block is not None else 0,
            "notes": [list(note) for note in self._notes],
            "close": close,
            "dropped": self.dropped,
            "left": self._left,
        }
        self._follow_up()
        kept = self._block, self._at, self._end, self._notes, self._note_bytes
        try:
            # Before it is sent, because its steps would be read twice if this process were killed or interrupted.
            self._tape.begin(None)
            self._block, self._at, self._end, self._notes, self._note_bytes = None, 0, 0, [], 0
            self._line.send(codec.encode(order), 0 if close else socket.MSG_DONTWAIT)
        except OSError as error:
            self._block, self._at, self._end, self._notes, self._note_bytes = kept
            if self._block is not None:
                self._tape.begin(self._number)
                self._tape.words[1] = self._at
            if not isinstance(error, BlockingIOError):  # else the line is full of notes, and the block is kept
                self.read_answers()  # the last one says why the process has ended
                if not self.closed:
                    self._lose(error)
        except BaseException:  # Ctrl-C: whether it was sent is not known
            self._block, self._at, self._end, self._notes, self._note_bytes = None, 0, 0, [], 0
            self._miss_what_is_under_way()
            raise

    def read_answers(self, wait_s: float = 0.0) -> None:
        """Take all answers that are there, and the next one for up to ``wait_s``."""
        if not self.opened:
            return
        try:
            self._line.settimeout(wait_s)
            while True:
                answer = self._line.recv(MESSAGE_BYTES_MAX)
                if not answer:
                    raise ConnectionResetError("its process has ended")
                found = codec.decode(answer)
                self.counts = found["counts"]
                if found["block"] is not None:
                    self._free.append(found["block"])
                self.records = not (found["closed"] or self.counts["ended"])
                if found["closed"]:
                    self.closed = True
                    return
                self._line.settimeout(0.0)
        except (BlockingIOError, socket.timeout):  # which is no ``TimeoutError`` before Python 3.10
            return
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Go on without recording: the process that writes has ended."""
        self.records, self.closed = False, True
        self.counts = {**self.counts, "ended": self.counts["ended"] or f"{error}"}


def _is_by_env(infos: Mapping[Any, Any]) -> bool:
    return isinstance(next(iter(infos), ""), int)


def _final(infos: Mapping[Any, Any], env: int) -> Any:
    """The last observation of an episode that ended in the same step."""
    return infos[env]["final_obs"] if _is_by_env(infos) else infos["final_obs"][env]


def _failure(infos: Mapping[Any, Any], env: int) -> str:
    """Text of an env's failure."""
    found = infos[env].get("env_failure") if _is_by_env(infos) else infos.get("env_failure", {env: None})[env]
    if found is None:
        return "failed"
    return f"{found.cause}: {found.message}"[:NOTE_CHARACTERS]
