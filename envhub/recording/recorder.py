"""The half of a recording that sees the envs: it writes what each step brought into a tape, and hands over full blocks.

A step costs a few copies of arrays and waits for nothing. How many envs are recorded at a time follows from how quickly
the process that writes gives blocks back: while few are free, half of the episodes under way are dropped, and as many
fewer begin; while many are free, one more each time. Runs on Python 3.8 and later, in workers too.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import time
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from envhub.recording.tape import BLOCKS, Block, StepMark, TapeShape, is_frame, new_tape, steps_of
from envhub.values import codec, spaces

START_S = 60.0  # for the process that writes to import what it needs
CLOSE_S = 1.0  # for it to take the last block
HANDED_OVER_S = 1.0  # after this long a block is handed over though it is not full
MESSAGE_BYTES_MAX = 1 << 16
NOTES_BYTES_MAX = 1 << 16  # of a block: seeds, and what was said of failures
NOTE_BYTES = 20  # of the numbers of a note
NOTE_CHARACTERS = 300
FEW, MANY = BLOCKS // 4, BLOCKS // 2  # free blocks
WHOLE_STEP_BYTES = 1 << 16  # up to which copying all envs is quicker than choosing
SAME_STEP, DISABLED = "SameStep", "Disabled"  # of ``AutoresetMode``, which older Gymnasium lacks

# As plain numbers: in most steps few episodes begin or end, and up to some hundred Python counts off more quickly than
# NumPy's arrays.
_BEGIN, _STEP, _FAILED, _FINAL, _CUT, _ABORT = map(
    int, (StepMark.BEGIN, StepMark.STEP, StepMark.FAILED, StepMark.FINAL, StepMark.CUT, StepMark.ABORT)
)
_TERMINATED, _TRUNCATED = int(StepMark.TERMINATED), int(StepMark.TRUNCATED)

log = logging.getLogger("envhub")


class Selection(NamedTuple):
    """What of a batch of envs is recorded.

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
    """What a step was for each env of a batch, where that does not follow from the steps before.

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
        begun: how many episodes of each env of the session have begun, which is kept up to date; None for none.

    Attributes:
        dropped: how many episodes were begun, or were to begin, and are not recorded; the process may drop others.
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
        self._marks = bytearray(places)  # of a step in which nothing begins or ends: STEP where an episode is recorded
        self._expecting: list[int] = []  # places whose next step is their reset
        self._ids = np.array(self._envs if selection.numbers is None else selection.numbers, np.int64)
        self._begun = np.zeros(int(self._ids.max(initial=0)) + 1, np.int64) if begun is None else begun
        self._since = [0] * places  # the number of the step with which the recorded one began
        self._owed = bytearray(places)  # marks for the next step that is written
        self._is_owing = False
        self.frames_due: list[int] = []
        self._on_count, self._limit = 0, places
        self._steps = 0
        self._block: Block | None = None
        self._number, self._at, self._due = -1, 0, 0.0
        self._free = [*range(BLOCKS)]
        self._notes: list[tuple[int, int, Any]] = []
        self._note_bytes = 0
        self.dropped = 0
        self.counts: dict[str, Any] = {"episodes": 0, "nbytes": 0, "dropped": 0, "ended": ""}
        self.opened = self.closed = False

    def open(self, frame: tuple[int, ...] = (), wait_s: float = START_S) -> None:
        """Make the tape, and wait for up to ``wait_s`` for the process that writes.

        Frames have this shape; if that is none of ``(height, width, 3)``, nothing is filmed.

        Raises:
            OSError: there is no memory.
        """
        observations, actions = ([leaf.wire() for leaf in spaces.leaves(space)] for space in self._spaces)
        finals = self._mode == SAME_STEP
        if self._films and not is_frame(frame):
            log.warning("nothing is filmed: frames are to be (height, width, 3), and these are %s", frame)
            self._films, frame = [], ()
        shape = TapeShape(len(self._envs), 1, observations, actions, finals, frame, len(self._films))
        shape = TapeShape(**{**vars(shape), "steps": steps_of(shape, self._queue_bytes)})
        self._tape, descriptor = new_tape(shape)
        self._whole = [leaf[0].nbytes <= WHOLE_STEP_BYTES for leaf in self._tape.blocks[0].observations]
        self.opened = True
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

    @property
    def records(self) -> bool:
        """Whether an episode is under way that is recorded."""
        return self._on_count > 0

    # --- what the vector env reports ----------------------------------------------------------------------------------

    def reset(
        self,
        mask: np.ndarray | None,
        seeds: Sequence[int | None] | None,
        leaves: Sequence[np.ndarray],
        frame: tuple[int, ...] = (),
    ) -> None:
        """Every env, or those of the mask, was reset and shows these observations; films have frames of this shape."""
        if self.closed:
            return
        if not self.opened:
            self.open(frame)
        places = [*range(len(self._envs))] if mask is None else np.flatnonzero(self._of_chosen(mask)).tolist()
        room = self._has_room()
        marks = bytearray(len(self._envs))
        running = [place for place in places if self._marks[place]]
        for place in running:
            marks[place] = _CUT
        self._stop(running)
        self._expecting = sorted({*self._expecting}.difference(places))
        self._begin(places, marks, room, dict(enumerate(seeds or ())))
        if room:
            self._write(marks, leaves)

    def acted(self, leaves: Sequence[Any]) -> None:
        """A step with these actions begins: an array or a list for each leaf of the action space."""
        if not self._on_count or self.closed or not self._has_room():
            return
        assert self._block is not None
        try:
            for column, leaf in zip(self._block.actions, leaves):
                column[self._at] = leaf if self._chosen is None else np.asarray(leaf)[self._chosen]
        except (ValueError, TypeError) as error:  # of a form that envs understand, and their space does not
            self._drop(self._recorded())
            log.warning("actions cannot be recorded: %s", error)

    def stepped(
        self,
        leaves: Sequence[np.ndarray],
        flags: tuple[np.ndarray, np.ndarray, np.ndarray],
        infos: Mapping[Any, Any],
        moves: Moves | None = None,
        last: bool = False,
    ) -> None:
        """The step brought these observations, rewards, terminations and truncations, and infos, batched or by env.

        Without ``moves`` every env moved, and those were reset whose episode had ended, where the mode is NEXT_STEP.
        The ``last`` step only ends episodes: those that begin with it belong to another recorder of these envs.
        """
        if self.closed:
            return
        self._steps += 1
        rewards, terminated, truncated = flags if self._chosen is None else map(self._of_chosen, flags)
        if moves is not None:
            terminated, truncated = self._moved(moves, terminated, truncated)
        ended = (terminated | truncated).nonzero()[0].tolist()
        changing = ended or self._expecting
        if not changing and not self._on_count and not self._is_owing:
            return
        room = self._has_room()
        marks = self._marks
        if changing:
            marks, begins = self._changes(ended, terminated, truncated, infos, room)
            if begins and not last:
                self._begin(begins, marks, room, {} if moves is None else moves.seeds)
        if moves is not None and moves.stepped is not None:
            marks = bytearray(np.frombuffer(marks, np.uint8) * self._of_chosen(moves.stepped))
        if room:
            assert self._block is not None
            self._block.rewards[self._at] = rewards
            self._write(marks, leaves)

    def _moved(self, moves: Moves, terminated: np.ndarray, truncated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Note what the step was; returns the flags of the envs that moved."""
        self.failed(moves.failed)
        reset = moves.reset or ()
        self._expecting = (
            [*reset] if self._chosen is None else [self._envs.index(env) for env in reset if env in self._envs]
        )
        if moves.stepped is None:
            return terminated, truncated
        stepped = self._of_chosen(moves.stepped)
        return terminated & stepped, truncated & stepped

    def failed(self, failed: Mapping[int, str]) -> None:
        """The episodes of these envs ended without a result; what is said of them goes with the next step."""
        places = [self._envs.index(env) for env in failed if env in self._envs]
        places = [place for place in places if self._marks[place]]
        if not places or self.closed:
            return
        self._owe(places, _CUT)
        if self._has_room():
            for place in places:
                self._note(place, failed[self._envs[place]][:NOTE_CHARACTERS] or "failed")
        self._stop(places)

    def add_frames(self, frames: Sequence[np.ndarray]) -> None:
        """The frames of ``frames_due``, uint8 ``(height, width, 3)``."""
        assert self._block is not None
        for env, frame in zip(self.frames_due, frames):
            self._block.frames[self._at, self._films.index(env)] = frame
        self.frames_due = []
        self._complete_step()

    def broke_off(self, failed: int | None = None, why: str = "") -> None:
        """A step or reset ended without a result, so that the envs may have moved unseen; this env failed."""
        if self.closed or not self._on_count:
            return
        running = self._recorded()
        self._owe(running, _CUT)
        room = self._has_room()
        place = self._envs.index(failed) if failed in self._envs else None
        if place is not None and room and self._marks[place]:
            self._note(place, why[:NOTE_CHARACTERS] or "failed")
        self._expecting = []
        self._stop(running)
        if room:
            self._write(self._marks, None)

    def close(self) -> None:
        """Hand over what is complete, and close the line; nothing is recorded any more."""
        if self._line.fileno() < 0:
            return
        if self.opened and not self.closed:
            self._line.settimeout(CLOSE_S)
            self._hand_over(close=True)
        self.closed = True
        self._line.close()

    # --- which episodes -----------------------------------------------------------------------------------------------

    def _changes(
        self, ended: list[int], terminated: np.ndarray, truncated: np.ndarray, infos: Mapping[Any, Any], room: bool
    ) -> tuple[bytearray, list[int]]:
        """The marks of a step in which the episodes at these places end, and the places at which others begin."""
        marks, same_step = bytearray(self._marks), self._mode == SAME_STEP
        failed = self._failed(infos) if infos else ()
        for place in ended:
            if not marks[place]:
                continue
            self._marks[place] = 0
            self._on_count -= 1
            marks[place] |= (_TERMINATED if terminated[place] else 0) | (_TRUNCATED if truncated[place] else 0)
            if place in failed:
                marks[place] |= _FAILED
                if room:
                    self._note(place, _failure(infos, self._envs[place]))
            elif same_step and room:
                self._write_final(place, _final(infos, self._envs[place]))
                marks[place] |= _FINAL
        begins = sorted({*self._expecting, *ended}) if same_step else self._expecting
        if failed:
            begins = [place for place in begins if place not in failed]
        if self._mode != DISABLED:
            self._expecting = sorted(failed) if same_step else ended
        return marks, begins

    def _begin(self, places: list[int], marks: bytearray, room: bool, seeds: Mapping[int, int | None]) -> None:
        """Begin to record those episodes that begin at these places and are wanted, as far as there is room."""
        wanted = places
        if self._every > 1:
            begun = self._begun[self._ids[places]]
            wanted = [place for place, before in zip(places, begun.tolist()) if before % self._every == 0]
            self._begun[self._ids[places]] += 1
        if self.counts["ended"]:
            wanted = []
        allowed = max(0, self._limit - self._on_count) if room else 0
        if len(wanted) > allowed:
            self.dropped += len(wanted) - allowed
            wanted = wanted[:allowed]
        for place in wanted:
            marks[place] |= _BEGIN
            self._on_count += not self._marks[place]
            self._marks[place], self._since[place] = _STEP, self._steps
            if seeds:
                self._note(place, seeds.get(self._envs[place]))

    def _failed(self, infos: Mapping[Any, Any]) -> set[int]:
        """The places whose envs failed in this step."""
        if "invalid_transition" in infos:
            return {*np.flatnonzero(self._of_chosen(np.asarray(infos["invalid_transition"], bool))).tolist()}
        if not _is_by_env(infos):
            return set()
        failed = [env for env, info in infos.items() if info.get("invalid_transition")]
        return {self._envs.index(env) for env in failed if env in self._envs}

    def _recorded(self) -> list[int]:
        """The places whose episodes are being recorded."""
        return [place for place, mark in enumerate(self._marks) if mark]

    def _stop(self, places: Sequence[int]) -> None:
        """Record the episodes that are under way at these places no more."""
        for place in places:
            self._on_count -= self._marks[place] == _STEP
            self._marks[place] = 0

    def _drop(self, places: Sequence[int]) -> None:
        """Do not record the episodes under way at these places after all."""
        self._owe(places, _ABORT)
        self._stop(places)
        self.dropped += len(places)

    def _owe(self, places: Sequence[int], mark: int) -> None:
        """Add the mark to the next step that is written."""
        for place in places:
            self._owed[place] |= mark
        self._is_owing = True

    def _of_chosen(self, batch: np.ndarray) -> np.ndarray:
        chosen: np.ndarray = batch if self._chosen is None else batch[self._chosen]
        return chosen

    # --- the tape -----------------------------------------------------------------------------------------------------

    def _write(self, marks: bytearray, leaves: Sequence[np.ndarray] | None) -> None:
        """Write the marks and observations of a step, and complete it if no frames belong to it."""
        block, at = self._block, self._at
        assert block is not None
        if self._is_owing:
            marks = bytearray(mark | owed for mark, owed in zip(marks, self._owed))
            self._owed, self._is_owing = bytearray(len(marks)), False
        for column, leaf, whole in zip(block.observations, leaves or (), self._whole):
            if whole or self._on_count == len(marks):
                column[at] = leaf if self._chosen is None else leaf[self._chosen]
            else:
                for place in [place for place, mark in enumerate(marks) if mark]:
                    column[at, place] = leaf[self._envs[place]]
        block.marks[at] = marks
        if self._films and leaves is not None:
            shown = [mark & _BEGIN or mark & (_STEP | _FINAL) == _STEP for mark in marks]  # a final observation is not
            self.frames_due = [env for env in self._films if shown[self._envs.index(env)]]
        if not self.frames_due:
            self._complete_step()

    def _complete_step(self) -> None:
        self._at += 1
        self._tape.written(self._at)
        # Notes are not in the tape, and are lost if this process is killed. Where few blocks are free they wait.
        noted = self._notes and len(self._free) >= MANY
        if noted or self._at == self._tape.shape.steps or time.monotonic() > self._due:
            self._hand_over()

    def _write_final(self, place: int, observation: Any) -> None:
        assert self._block is not None
        parts = spaces.flatten(self._spaces[0], observation)
        for column, part in zip(self._block.finals, parts):
            column[self._at, place] = part

    def _note(self, place: int, note: Any) -> None:
        nbytes = NOTE_BYTES + (len(note.encode()) if isinstance(note, str) else 0)
        if note is not None and self._note_bytes + nbytes <= NOTES_BYTES_MAX:
            self._note_bytes += nbytes
            self._notes.append((self._at, place, note))

    def _has_room(self) -> bool:
        """Whether there is a block to write into; if there is none, all episodes under way are dropped."""
        if self._block is not None:
            if self._at < self._tape.shape.steps:
                return True
            self._hand_over()  # which the line had no room for before
        self.read_answers()
        if self._block is None and self._free and not self.counts["ended"]:
            self._number = self._free.pop()
            self._block, self._at = self._tape.blocks[self._number], 0
            self._due = time.monotonic() + HANDED_OVER_S
            self._tape.begin(self._number)
            if len(self._free) < FEW:
                self._shed()
            elif len(self._free) >= MANY:
                self._limit = min(len(self._marks), self._limit + 1)
            return True
        if self._on_count:
            self._limit = max(1, self._limit // 2)
            self._drop(self._recorded())
        return False

    def _shed(self) -> None:
        """Drop the half of the episodes under way that began last, and let as many fewer begin."""
        oldest = sorted(self._recorded(), key=lambda place: self._since[place])
        self._limit = max(1, min(self._limit, len(oldest)) // 2)
        if newest := oldest[self._limit :]:
            self._drop(newest)

    # --- the other process --------------------------------------------------------------------------------------------

    def _hand_over(self, close: bool = False) -> None:
        """Give the block to the other process, which gives it back when it has read it."""
        order = {
            "block": max(0, self._number),
            "steps": self._at if self._block is not None else 0,
            "notes": [list(note) for note in self._notes],
            "close": close,
            "dropped": self.dropped,
        }
        self._tape.begin(None)  # before it is sent, because its steps would be read twice if this process were killed
        try:
            self._line.send(codec.encode(order), 0 if close else socket.MSG_DONTWAIT)
        except OSError as error:
            if self._block is not None:
                self._tape.begin(self._number)
                self._tape.written(self._at)
            if not isinstance(error, BlockingIOError):  # else the line is full of notes, and the block is kept
                self.read_answers()  # the last one says why the process has ended
                if not self.closed:
                    self._lose(error)
        else:
            self._block, self._notes, self._note_bytes = None, [], 0

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
        self.closed = True
        self.counts = {**self.counts, "ended": self.counts["ended"] or f"{error}"}


def _is_by_env(infos: Mapping[Any, Any]) -> bool:
    return isinstance(next(iter(infos), ""), int)


def _final(infos: Mapping[Any, Any], env: int) -> Any:
    """The last observation of an episode that ended in the same step."""
    return infos[env]["final_obs"] if _is_by_env(infos) else infos["final_obs"][env]


def _failure(infos: Mapping[Any, Any], env: int) -> str:
    """What is said of an env's failure."""
    found = infos[env].get("env_failure") if _is_by_env(infos) else infos.get("env_failure", {env: None})[env]
    if found is None:
        return "failed"
    return f"{found.cause}: {found.message}"[:NOTE_CHARACTERS]
