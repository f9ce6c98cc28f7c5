"""The program's half of a recording: it writes what each step brought into a tape, and hands over full blocks.

A step costs a few copies of arrays and waits for nothing. How many envs are recorded at a time follows from how quickly
the other process gives blocks back: while few are free, half of the episodes under way are dropped, and as many fewer
begin; while many are free, one more each time.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from envhub.errors import UnsupportedSpace
from envhub.values import codec, spaces
from envhub.values.leaf import OBJECT
from envhub_client.deadline import Deadline
from envhub_client.recording.folder import claim
from envhub_client.recording.options import RecordOptions
from envhub_client.recording.tape import BLOCKS, Block, StepMark, TapeShape, new_tape, steps_of

START_S = 60.0  # for the other process to import what it needs
CLOSE_S = 60.0  # for it to write what it has
HANDED_OVER_S = 1.0  # after this long a block is handed over though it is not full
MESSAGE_BYTES_MAX = 1 << 16
NOTES_BYTES_MAX = 1 << 16  # of a block: seeds, and what was said of failures
NOTE_BYTES = 20  # of the numbers of a note
NOTE_CHARACTERS = 300
FEW, MANY = BLOCKS // 4, BLOCKS // 2  # free blocks
WHOLE_STEP_BYTES = 1 << 16  # up to which copying all envs is quicker than choosing

_STEP = np.uint8(StepMark.STEP)

log = logging.getLogger("envhub")


class Recorded(NamedTuple):
    """What a session has recorded so far.

    Attributes:
        folder: where.
        episodes: how many are written.
        nbytes: their size.
        dropped: how many were begun, or were to begin, and are not recorded, as the disk and the CPU did not keep up.
        ended: why nothing more is recorded; empty as long as something is.
    """

    folder: Path
    episodes: int
    nbytes: int
    dropped: int
    ended: str


class EpisodeRecorder:
    """Records one vector env.

    Args:
        options: what is recorded.
        num_envs: of the vector env.
        observation_space, action_space: of one env.
        mode: its autoreset mode.
        about: what is written beside the episodes: env, kwargs, versions.
        spec: of the env, in JSON; empty for none.
        fps: of films.

    Raises:
        UnsupportedSpace: a space has parts that are no arrays.
        ValueError: the options do not fit the envs.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        options: RecordOptions,
        num_envs: int,
        observation_space: Space[Any],
        action_space: Space[Any],
        mode: AutoresetMode,
        about: Mapping[str, Any],
        spec: str,
        fps: float,
    ) -> None:
        self._options, self._mode, self._spec, self._fps = options, mode, spec, fps
        self._num_envs = num_envs
        self._spaces = observation_space, action_space
        for space in self._spaces:
            if OBJECT in spaces.leaves(space):
                raise UnsupportedSpace(f"{space} cannot be recorded: it has parts that are no arrays of a fixed size")
        chosen = options.chosen(num_envs)
        self._chosen = None if len(chosen) == num_envs else np.array(chosen)
        self._env_ids, self._films = chosen, sorted(options.film)
        self._folder = claim(Path(options.folder).expanduser().absolute())
        self._about = {**about, "env_ids": chosen, "every": options.every, "only": options.only}
        places = len(chosen)
        self._on = np.zeros(places, bool)  # an episode of it is being recorded
        self._expecting = np.zeros(places, bool)  # its next step is its reset
        self._begun = np.zeros(places, np.int64)  # how many episodes of it
        self._since = np.zeros(places, np.int64)  # the number of the step with which the recorded one began
        self._marks = np.zeros(places, np.uint8)  # of a step in which nothing begins or ends
        self._owed = np.zeros(places, np.uint8)  # marks for the next step that is written
        self._is_expecting = self._is_owing = False
        self._frames_due: list[int] = []  # envs whose frames are to be added to the step that is being written
        self._on_count, self._limit = 0, places
        self._steps = 0
        self._block: Block | None = None
        self._number, self._at, self._due = -1, 0, 0.0
        self._free = [*range(BLOCKS)]
        self._notes: list[tuple[int, int, Any]] = []
        self._note_bytes = 0
        self._counts: dict[str, Any] = {"episodes": 0, "nbytes": 0, "dropped": 0, "ended": ""}
        self._dropped = 0
        self._started = self._closed = False
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "envhub_client.recording.process", str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    @property
    def recorded(self) -> Recorded:
        """What is recorded so far."""
        if not self._closed:
            self._read_answers()
        counts = self._counts
        dropped = counts["dropped"] + self._dropped
        return Recorded(self._folder, counts["episodes"], counts["nbytes"], dropped, counts["ended"])

    @property
    def frames_due(self) -> list[int]:
        """The envs of which ``add_frames`` is to be given frames before anything else is reported."""
        return self._frames_due

    # --- what the vector env reports ----------------------------------------------------------------------------------

    def reset(
        self,
        mask: np.ndarray | None,
        seeds: Sequence[int | None] | None,
        leaves: Sequence[np.ndarray],
        frame: tuple[int, ...] = (),
    ) -> None:
        """Every env, or those of the mask, was reset and shows these observations; films have frames of this shape."""
        if self._closed:
            return
        if not self._started:
            self._start(frame)
        places = np.arange(len(self._env_ids)) if mask is None else np.flatnonzero(self._of_chosen(mask))
        room = self._has_room()
        marks = np.zeros(len(self._env_ids), np.uint8)
        marks[places[self._on[places]]] = StepMark.CUT
        self._on[places] = self._expecting[places] = False
        self._begin(places, marks, room)
        self._is_expecting = bool(self._expecting.any())
        if room:
            for place in places[(marks[places] & StepMark.BEGIN) != 0].tolist() if seeds else ():
                self._note(place, (seeds or [])[self._env_ids[place]])
            self._write(marks, leaves)

    def acted(self, leaves: Sequence[Any]) -> None:
        """A step with these actions begins: an array or a list for each leaf of the action space."""
        if not self._on_count or self._closed or not self._has_room():
            return
        assert self._block is not None
        try:
            for array, leaf in zip(self._block.actions, leaves, strict=True):
                array[self._at] = leaf if self._chosen is None else np.asarray(leaf)[self._chosen]
        except (ValueError, TypeError) as error:  # of a form that envs understand, and their space does not
            self._drop(np.flatnonzero(self._on))
            log.warning("actions cannot be recorded: %s", error)

    def stepped(
        self,
        leaves: Sequence[np.ndarray],
        flags: tuple[np.ndarray, np.ndarray, np.ndarray],
        infos: Mapping[Any, Any],
    ) -> None:
        """The step brought these observations, rewards, terminations and truncations, and infos, batched or by env."""
        if self._closed:
            return
        self._steps += 1
        rewards, terminated, truncated = flags if self._chosen is None else map(self._of_chosen, flags)
        ended: np.ndarray = terminated | truncated
        changing = self._is_expecting or b"\1" in ended.tobytes()  # which takes a fifth of the time of ``any``
        if not changing and not self._on_count:
            return
        room = self._has_room()
        marks = self._changes(ended, terminated, truncated, infos, room) if changing else self._marks
        if room:
            assert self._block is not None
            self._block.rewards[self._at] = rewards
            self._block.terminations[self._at], self._block.truncations[self._at] = terminated, truncated
            self._write(marks, leaves)

    def add_frames(self, frames: Sequence[np.ndarray]) -> None:
        """The frames of ``frames_due``, uint8 ``(height, width, 3)``."""
        assert self._block is not None
        for env, frame in zip(self._frames_due, frames, strict=True):
            self._block.frames[self._at, self._films.index(env)] = frame
        self._frames_due = []
        self._complete_step()

    def broke_off(self, failed: int | None = None, why: str = "") -> None:
        """A step or reset ended without a result, so that the envs may have moved unseen; this env failed."""
        if self._closed or not self._on_count:
            return
        self._owe(self._on, StepMark.CUT)
        room = self._has_room()
        if failed in self._env_ids and room and self._on[place := self._env_ids.index(failed)]:
            self._note(place, why[:NOTE_CHARACTERS] or "failed")
        self._on[:] = self._expecting[:] = self._is_expecting = False
        self._count()
        if room:
            self._write(self._marks, None)

    def close(self) -> None:
        """Have everything written that is complete, and say what was not."""
        if self._line.fileno() < 0:
            return
        try:
            if self._started and not self._closed:
                self._hand_over(close=True)
                deadline = Deadline(CLOSE_S)
                while not self._closed and (left_s := deadline.left_s()) > 0:
                    self._read_answers(left_s)
        finally:
            self._closed = True
            self._line.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if not self._started:
                self._folder.rmdir()  # nothing was reset, and nothing is in it
        found = self.recorded
        level = logging.WARNING if found.dropped or found.ended else logging.INFO
        log.log(
            level,
            "%d episodes (%.1f MB) are recorded in %s; %d were dropped%s",
            *(found.episodes, found.nbytes / 1e6, found.folder, found.dropped),
            f"; {found.ended}" if found.ended else "",
        )

    # --- which episodes -----------------------------------------------------------------------------------------------

    def _changes(
        self, ended: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, infos: Mapping[Any, Any], room: bool
    ) -> np.ndarray:
        """The marks of a step in which episodes end or begin."""
        # As whole arrays, because choosing elements takes longer for as few envs as there are.
        flags = terminated * np.uint8(StepMark.TERMINATED) | truncated * np.uint8(StepMark.TRUNCATED)
        marks: np.ndarray = self._marks | flags * self._on
        last = (ended & self._on).nonzero()[0]
        self._on &= ~ended
        failed = self._failed(infos)
        if failed is not None:
            marks[last] |= failed[last] * np.uint8(StepMark.FAILED)
        same_step = self._mode is AutoresetMode.SAME_STEP
        for place in last.tolist() if room and (same_step or failed is not None) else ():
            if failed is not None and failed[place]:
                self._note(place, _failure(infos, self._env_ids[place]))
            elif same_step:
                self._write_final(place, _final(infos, self._env_ids[place]))
                marks[place] |= np.uint8(StepMark.FINAL)
        begins = self._expecting | ended if same_step else self._expecting
        if failed is not None:
            begins = begins & ~failed
        if self._mode is not AutoresetMode.DISABLED:
            self._expecting = np.zeros_like(ended) if same_step else ended
            if same_step and failed is not None:
                self._expecting = failed
            self._is_expecting = b"\1" in self._expecting.tobytes()
        self._begin(begins.nonzero()[0], marks, room)
        return marks

    def _begin(self, places: np.ndarray, marks: np.ndarray, room: bool) -> None:
        """Begin to record those episodes that begin at these places and are wanted, as far as there is room."""
        wanted = places
        if self._options.every > 1:
            wanted = places[self._begun[places] % self._options.every == 0]
            self._begun[places] += 1
        self._count()
        if self._counts["ended"]:
            wanted = wanted[:0]
        allowed = max(0, self._limit - self._on_count) if room else 0
        if len(wanted) > allowed:
            self._dropped += len(wanted) - allowed
            wanted = wanted[:allowed]
        if len(wanted):
            marks[wanted] |= np.uint8(StepMark.BEGIN)
            self._on[wanted], self._since[wanted] = True, self._steps
            self._count()

    def _failed(self, infos: Mapping[Any, Any]) -> np.ndarray | None:
        """Which of the chosen envs failed in this step; None if none did."""
        if "invalid_transition" in infos:
            return self._of_chosen(np.asarray(infos["invalid_transition"], bool))
        if not _is_by_env(infos) or not any(info.get("invalid_transition") for info in infos.values()):
            return None
        failed = [bool(infos.get(env, {}).get("invalid_transition")) for env in range(self._num_envs)]
        return self._of_chosen(np.array(failed))

    def _count(self) -> None:
        self._marks = self._on * _STEP
        self._on_count = int(np.count_nonzero(self._on))

    def _drop(self, places: np.ndarray) -> None:
        """Do not record the episodes under way at these places after all."""
        self._owe(places, StepMark.ABORT)
        self._on[places] = False
        self._dropped += len(places)
        self._count()

    def _owe(self, places: np.ndarray, mark: StepMark) -> None:
        """Add the mark to the next step that is written."""
        self._owed[places] |= np.uint8(mark)
        self._is_owing = True

    def _of_chosen(self, batch: np.ndarray) -> np.ndarray:
        chosen: np.ndarray = batch if self._chosen is None else batch[self._chosen]
        return chosen

    # --- the tape -----------------------------------------------------------------------------------------------------

    def _write(self, marks: np.ndarray, leaves: Sequence[np.ndarray] | None) -> None:
        """Write the marks and observations of a step, and complete it if no frames belong to it."""
        block, at = self._block, self._at
        assert block is not None
        if self._is_owing:
            marks = marks | self._owed
            self._owed[:], self._is_owing = 0, False
        for array, leaf, whole in zip(block.observations, leaves or (), self._whole, strict=False):
            if whole or self._on_count == len(marks):
                array[at] = leaf if self._chosen is None else leaf[self._chosen]
            else:
                for place in np.flatnonzero(marks).tolist():
                    array[at, place] = leaf[self._env_ids[place]]
        block.marks[at] = marks
        if self._films and leaves is not None:
            self._frames_due = [env for env in self._films if marks[self._env_ids.index(env)]]
        if not self._frames_due:
            self._complete_step()

    def _complete_step(self) -> None:
        self._at += 1
        self._tape.written(self._at)
        if self._at == self._tape.shape.steps or time.monotonic() > self._due:
            self._hand_over()

    def _write_final(self, place: int, observation: Any) -> None:
        assert self._block is not None
        parts = spaces.flatten(self._spaces[0], observation)
        for array, part in zip(self._block.finals, parts, strict=True):
            array[self._at, place] = part

    def _note(self, place: int, note: Any) -> None:
        nbytes = NOTE_BYTES + (len(note.encode()) if isinstance(note, str) else 0)
        if note is not None and self._note_bytes + nbytes <= NOTES_BYTES_MAX:
            self._note_bytes += nbytes
            self._notes.append((self._at, place, note))

    def _has_room(self) -> bool:
        """Whether there is a block to write into; if there is none, all episodes under way are dropped."""
        if self._block is not None:
            return True
        self._read_answers()
        if self._free and not self._counts["ended"]:
            self._number = self._free.pop()
            self._block, self._at = self._tape.blocks[self._number], 0
            self._due = time.monotonic() + HANDED_OVER_S
            self._tape.begin(self._number)
            if len(self._free) < FEW:
                self._shed()
            elif len(self._free) >= MANY:
                self._limit = min(len(self._on), self._limit + 1)
            return True
        if self._on_count:
            self._limit = max(1, self._limit // 2)
            self._drop(np.flatnonzero(self._on))
        return False

    def _shed(self) -> None:
        """Drop the half of the episodes under way that began last, and let as many fewer begin."""
        on = np.flatnonzero(self._on)
        self._limit = max(1, min(self._limit, len(on)) // 2)
        newest = on[np.argsort(self._since[on], kind="stable")][self._limit :]
        if len(newest):
            self._drop(newest)

    # --- the other process --------------------------------------------------------------------------------------------

    def _start(self, frame: tuple[int, ...]) -> None:
        observations, actions = ([leaf.wire() for leaf in spaces.leaves(space)] for space in self._spaces)
        finals = self._mode is AutoresetMode.SAME_STEP
        shape = TapeShape(len(self._env_ids), 1, observations, actions, finals, frame, len(self._films))
        options = self._options
        shape = TapeShape(**{**vars(shape), "steps": steps_of(shape, options.queue_bytes)})
        setup = {
            "shape": shape.wire(),
            "folder": str(self._folder),
            "spaces": [codec.encode(spaces.describe(space)) for space in self._spaces],
            "spec": self._spec,
            "fps": self._fps,
            "env_ids": self._env_ids,
            "film": self._films,
            "only": options.only,
            "about": codec.encode(self._about, codec.as_repr),
            "limits": {
                "episodes_max": options.episodes_max,
                "bytes_max": options.bytes_max,
                "held_bytes": options.queue_bytes,
            },
        }
        self._tape, tape = new_tape(shape)
        self._whole = [leaf[0].nbytes <= WHOLE_STEP_BYTES for leaf in self._tape.blocks[0].observations]
        described = os.memfd_create("envhub-recording-setup")
        try:
            with open(described, "wb", closefd=False) as file:
                file.write(codec.encode(setup))
            socket.send_fds(self._line, [b"record"], [tape, described])
        finally:
            os.close(tape)
            os.close(described)
        self._started = True
        self._read_answers(START_S)

    def _hand_over(self, close: bool = False) -> None:
        """Give the block to the other process, which gives it back when it has read it."""
        order = {
            "block": max(0, self._number),
            "steps": self._at if self._block is not None else 0,
            "notes": [list(note) for note in self._notes],
            "close": close,
            "dropped": self._dropped,
        }
        self._block, self._notes, self._note_bytes = None, [], 0
        self._tape.begin(None)
        try:
            self._line.send(codec.encode(order), 0 if close else socket.MSG_DONTWAIT)
        except OSError as error:
            self._read_answers()  # the last one says why the process has ended
            if not self._closed:
                self._lose(error)

    def _read_answers(self, wait_s: float = 0.0) -> None:
        """Take all answers that are there, and the next one for up to ``wait_s``."""
        if not self._started:
            return
        try:
            self._line.settimeout(wait_s)
            while True:
                answer = self._line.recv(MESSAGE_BYTES_MAX)
                if not answer:
                    raise ConnectionResetError("its process has ended")
                found = codec.decode(answer)
                self._counts = found["counts"]
                if found["block"] is not None:
                    self._free.append(found["block"])
                if found["closed"]:
                    self._closed = True
                    return
                self._line.settimeout(0.0)
        except (BlockingIOError, TimeoutError):
            return
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Go on without recording."""
        self._closed = True
        self._counts = {**self._counts, "ended": self._counts["ended"] or f"{error}"}
        log.warning("nothing more is recorded in %s: %s", self._folder, self._counts["ended"])


def check_packages(films: bool) -> None:
    """Refuse to record without what it needs.

    Raises:
        ModuleNotFoundError: Minari, or PyAV for films, is not installed.
        OSError: this machine does not run Linux.
    """
    if sys.platform != "linux":
        raise OSError("record= needs Linux: the process that writes reads memory that has no name")
    missing = [name for name in ("minari", "pyarrow", *(("av",) if films else ())) if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f'recording needs {" and ".join(missing)}: pip install "envhub-rl[record]"', name=missing[0]
        )


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
