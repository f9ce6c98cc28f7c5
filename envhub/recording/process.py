"""The process that records: it reads blocks of tapes, and writes the episodes that end in them.

Its program tells it over a socket what is recorded, and gives it a line for each tape: a socket to the process that
writes the tape, which may be the program itself. It runs only when no other process wants the CPU.
When the program ends, however it does, the sockets end. The process then takes a normal share of the CPU, writes what
is complete, and ends, too.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from envhub.freed_memory import keep_large_blocks
from envhub.recording.episodes import Episode, EpisodeCutter, Note
from envhub.recording.folder import ABOUT, RecordingFolder, bytes_of_all, claim, write_json
from envhub.recording.recorder_handle import share_cpu
from envhub.recording.tape import BLOCKS, Tape, TapeShape, is_frame, steps_of
from envhub.values import codec, spaces
from envhub.values.leaf import Leaf

MESSAGE_BYTES_MAX = 1 << 17
SETUP_BYTES_MAX = 1 << 26
BATCH_BYTES = 1 << 24  # of episodes that are forced to the disk together
LAST_WORDS_S = 5.0  # without a word of any line, after which those that have not ended are given up
KEPT_BYTES_MAX = 1 << 30  # of memory that episodes have used
FPS, FPS_MAX = 30.0, 1000.0  # of films of an env that does not say, or not sensibly
REFUSED_CHARACTERS = 300  # of why a line is refused
LOOK_S = 10.0  # between looks at what the other recordings in the folder hold


@dataclass
class Counts:
    """Counts of the episodes recorded so far.

    Attributes:
        episodes: in the folder.
        nbytes: of all episodes and films in it.
        dropped: episodes that were begun, or were to begin, and for which there was no room.
        ended: why nothing more is recorded; empty as long as something is.
    """

    episodes: int = 0
    nbytes: int = 0
    dropped: int = 0
    ended: str = ""


@dataclass(eq=False)
class Line:
    """The way to one tape.

    Attributes:
        env_ids: the env of each place of the tape.
        film: those of them that are filmed.
        queue_bytes: of the tape, or one step in each block.
        dropped: how many episodes were dropped at the other end.
    """

    socket: socket.socket
    env_ids: list[int]
    film: list[int]
    tape: Tape | None = None
    cutter: EpisodeCutter | None = None
    queue_bytes: int = 1
    dropped: int = 0


@dataclass(frozen=True)
class Given:
    """A block that the other end of a line hands over.

    Attributes:
        block, steps: which, and how many of its steps are complete.
        notes: seeds and failures, by step and place.
        dropped: how many episodes were dropped at the other end so far.
        left: how many blocks were left there when this one was taken.
        close: whether nothing follows.
    """

    block: int
    steps: int
    notes: dict[tuple[int, int], Note]
    dropped: int
    left: int
    close: bool

    @classmethod
    def read(cls, message: bytes, tape: Tape) -> Given:
        """Read which part of the tape this message hands over.

        Raises:
            Exception: it is not understood, or there is no such block.
        """
        order = codec.decode(message)
        notes = {(int(step), int(place)): note for step, place, note in order["notes"]}
        block, steps, dropped, left = (int(order[name]) for name in ("block", "steps", "dropped", "left"))
        given = cls(block, steps, notes, dropped, left, bool(order["close"]))
        if not (0 <= given.block < BLOCKS and 0 <= given.steps <= tape.shape.steps and given.dropped >= 0):
            raise ValueError(f"there is no such block: {given}")
        return given


class RecorderProcess:
    """Records what is written into the tapes of one session."""

    def __init__(self, program: socket.socket) -> None:
        self._program = program
        self._setup: dict[str, Any] = {}
        self._folder: RecordingFolder | None = None
        self._leaves: tuple[Sequence[Leaf], Sequence[Leaf]] = [], []  # of an observation, and of an action
        self._lines: dict[int, Line] = {}  # in the order in which their other ends have their envs
        self._dropped = 0  # at the other ends of lines that have ended
        self._counts = Counts()
        self._reported = ""  # why nothing more is recorded, as the program was told
        self._about: dict[str, Any] = {}
        self._filmed = 0
        self._others_bytes, self._look_s = 0, 0.0  # of the other recordings in the folder, and when to look again
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(program, selectors.EVENT_READ, self._on_program)

    def run(self) -> None:
        """Record until the program closes the recording, or is gone.

        Raises:
            Exception: such as of a full disk; the program is told, and what is not finished is removed.
        """
        try:
            self._record()
        except Exception as error:
            self._counts.ended = f"{type(error).__name__}: {error}"[:1000]
            if self._folder is not None:
                self._folder.close()
                with contextlib.suppress(OSError):  # the disk may be gone; the program is told in any case
                    self._write_about()
            self._report_closed()
            if not isinstance(error, OSError):
                raise

    def _record(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                key.data()
            if self._counts.ended != self._reported:
                self._report(closed=False)
        share_cpu(os.getpid())  # the program may have been killed, and so not have done it
        self._selector.unregister(self._program)
        while self._selector.get_map() and (ready := self._selector.select(LAST_WORDS_S)):
            for key, _ in ready:
                key.data()
        for number in [*self._lines]:
            self._end(number)
        if self._folder is not None:
            self._folder.close()
            if self._is_empty():
                self._folder.remove()
                self._folder = None
            else:
                self._write_about()
        self._report_closed()

    # --- what the program says ----------------------------------------------------------------------------------------

    def _on_program(self) -> bool:
        """Handle what the program says next; returns whether there was anything."""
        if not select.select([self._program], [], [], 0)[0]:
            return False  # it was read in the same turn
        message, descriptors = _received(self._program)
        order: dict[str, Any] = codec.decode(message) if message else {"say": "close"}
        if order["say"] == "close":
            self._closing = True
        elif order["say"] == "setup":
            with os.fdopen(descriptors[0], "rb") as file:
                file.seek(0)
                self._setup = codec.decode(file.read(SETUP_BYTES_MAX))
        elif order["say"] == "line":
            line = Line(
                socket.socket(fileno=descriptors[0]), order["env_ids"], order["film"], queue_bytes=order["queue_bytes"]
            )
            line.socket.setblocking(False)
            self._lines[order["number"]] = line
            self._selector.register(line.socket, selectors.EVENT_READ, partial(self._on_line, order["number"]))
        elif order["number"] not in self._lines:
            pass  # it has said itself that it ends
        elif order["say"] == "next":  # its other end has these envs from now on
            self._lines[order["number"]] = self._lines.pop(order["number"])
        else:  # its other end has ended; what it had sent comes first
            self._drain_before(order["number"])
            while self._hear(order["number"]):
                pass
            self._end(order["number"], order["why"])
        return True

    # --- lines --------------------------------------------------------------------------------------------------------

    def _on_line(self, number: int) -> bool:
        """Handle the next message of a line; returns whether there was one.

        Before it comes what was written by those who had these envs before, so that episodes are in their order: they
        had sent everything, or the program had said that they have ended, before this line's first step.
        """
        while not self._closing and self._on_program():
            pass
        self._drain_before(number)
        return self._hear(number)

    def _drain_before(self, number: int) -> None:
        """Handle everything that has come by the lines of the same envs that had them before."""
        envs = {*self._lines[number].env_ids} if number in self._lines else {*()}
        for older in takewhile(lambda each: each != number, [*self._lines]):
            while older in self._lines and envs & {*self._lines[older].env_ids} and self._hear(older):
                pass

    def _hear(self, number: int) -> bool:
        """Handle the next message of this line; returns whether there was one, and more may follow."""
        line = self._lines.get(number)
        if line is None or line.socket not in self._selector.get_map():
            return False
        try:
            message, descriptors = _received(line.socket)
        except BlockingIOError:  # it was read in the same turn
            return False
        if not message:
            self._selector.unregister(line.socket)
            return False  # the program says how its process ended, unless it has ended, too
        if self._folder is None:
            self._open_folder()
        given = None
        try:
            if line.tape is None:
                self._begin(line, message, descriptors)
            else:
                given = Given.read(message, line.tape)
        except Exception as error:  # whatever the code of an env has made of it, other envs are recorded
            self._refuse(number, f"a message of their worker is refused: {error!r}"[:REFUSED_CHARACTERS])
            return False
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if given is not None:
            line.dropped = given.dropped
            self._take(line, given.block, given.steps, given.notes, given.left)
            if given.close:
                self._end(number)
                return False
        send_answer(line.socket, None if given is None else given.block, self._counts, closed=False)
        return True

    def _refuse(self, number: int, why: str) -> None:
        """Record the envs of this line no more; both ends are told why."""
        line = self._lines[number]
        send_answer(line.socket, None, replace(self._counts, ended=why), closed=True)
        self._end(number)
        self._report(closed=False, refused={"env": line.env_ids[0], "num_envs": len(line.env_ids), "why": why})

    def _begin(self, line: Line, message: bytes, descriptors: Sequence[int]) -> None:
        """Map the tape that came with the first message of a line.

        Raises:
            Exception: it is none, or not of the envs of the line.
        """
        shape = TapeShape.from_wire(codec.decode(message)["shape"])
        check_shape(shape, line, self._leaves)
        line.tape = Tape(shape, descriptors[0])
        places = {line.env_ids.index(env): film for film, env in enumerate(line.film[: shape.films])}
        failed_only = self._setup["only"] == "failed"
        line.cutter = EpisodeCutter(shape, line.env_ids, places, self._add_frames, failed_only)

    def _open_folder(self) -> None:
        setup = self._setup
        # The next episodes take as much as those that have ended, whose columns are too large for what malloc keeps.
        keep_large_blocks(min(setup["limits"]["held_bytes"], KEPT_BYTES_MAX))
        observation_space, action_space = (spaces.build(codec.decode(blob)) for blob in setup["spaces"])
        self._leaves = spaces.leaves(observation_space), spaces.leaves(action_space)
        path = Path(setup["folder"])
        path = path if setup["claimed"] else claim(path, 0o700)  # what clients of a hub did is their own
        spec = setup["spec"] or _spec_in_json(setup["plain_spec"])
        fps = _fps_of(_read(setup["metadata"]))
        self._folder = RecordingFolder(path, spec, observation_space, action_space, fps)
        said = {key: [*map(_read, blobs)] for key, blobs in setup["blobs"].items()}
        self._about = {**codec.decode(setup["about"]), **said}
        self._check_limits()
        self._write_about()
        self._report(closed=False)  # where the folder is: it names it if this process is killed
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # only now: until here the program waits

    def _end(self, number: int, failure: str = "") -> None:
        """Forget a line; its episodes under way end here, by this failure if there is one."""
        line = self._lines.pop(number, None)
        if line is None:
            return
        if line.socket in self._selector.get_map():
            self._selector.unregister(line.socket)
        self._dropped += line.dropped
        if line.tape is not None and line.cutter is not None:
            self._take(line, *line.tape.unfinished(), notes={})  # which the other end, if killed, could not send
            self._keep(line.cutter.cut_all(failure, missing=bool(line.tape.words[2])))
        line.socket.close()

    def _take(
        self, line: Line, block: int, steps: int, notes: Mapping[tuple[int, int], Note], left: int = BLOCKS
    ) -> None:
        assert line.tape is not None and line.cutter is not None
        self._keep(line.cutter.take(line.tape.blocks[block], steps, notes, left))
        while self._held_bytes() > self._setup["limits"]["held_bytes"]:
            running = [cutter for cutter in self._cutters() if cutter.running]
            least = min(running, key=lambda cutter: min(each.nbytes for each in cutter.running))
            self._keep([least.drop_smallest()])

    def _cutters(self) -> list[EpisodeCutter]:
        return [line.cutter for line in self._lines.values() if line.cutter is not None]

    def _held_bytes(self) -> int:
        return sum(episode.nbytes for cutter in self._cutters() for episode in cutter.running)

    # --- the folder ---------------------------------------------------------------------------------------------------

    def _keep(self, ended: Iterable[Episode]) -> None:
        """Write those episodes that are wanted, up to ``BATCH_BYTES`` at once."""
        wanted: list[Episode] = []
        for episode in ended:
            self._counts.dropped += episode.ended == "dropped" and not self._counts.ended
            if self._is_wanted(episode):
                wanted.append(episode)
            elif episode.film is not None:
                episode.film.discard()
            if sum(each.nbytes for each in wanted) > BATCH_BYTES:
                self._write(wanted)
                wanted = []
        self._write(wanted)

    def _is_wanted(self, episode: Episode) -> bool:
        right = episode.ended == "failed" or self._setup["only"] != "failed"
        return right and episode.steps > 0 and episode.ended != "dropped" and not self._counts.ended

    def _write(self, episodes: list[Episode]) -> None:
        counts, limits = self._counts, self._setup["limits"]
        assert self._folder is not None
        left = limits["episodes_max"] - counts.episodes
        try:
            self._folder.add(episodes[:left])
        except OSError:
            counts.dropped += len(episodes[:left])
            raise
        for episode in episodes[left:]:
            if episode.film is not None:
                episode.film.discard()
        counts.episodes, counts.nbytes = self._folder.episodes, self._folder.nbytes
        self._check_limits()

    def _check_limits(self) -> None:
        counts, limits = self._counts, self._setup["limits"]
        assert self._folder is not None
        if time.monotonic() > self._look_s:
            self._others_bytes = max(0, bytes_of_all(self._folder.path.parent) - counts.nbytes)
            self._look_s = time.monotonic() + LOOK_S
        reached = {"episodes_max": counts.episodes, "bytes_max": counts.nbytes}
        for setting, count in {**reached, "folder_bytes_max": self._others_bytes + counts.nbytes}.items():
            if count >= limits[setting]:
                counts.ended = f"{setting}={limits[setting]} is reached"

    def _add_frames(self, episode: Episode, frames: np.ndarray) -> None:
        assert self._folder is not None
        if episode.film is None:
            self._filmed += 1
            episode.film = self._folder.film(str(self._filmed))
        episode.film.add(frames)

    def _write_about(self) -> None:
        assert self._folder is not None
        write_json(self._folder.path / ABOUT, {**self._about, **vars(self._counts), "dropped": self._all_dropped()})

    def _is_empty(self) -> bool:
        """True if no episode was to be recorded, as in a session that only asks for spaces, in a folder made here."""
        return not self._setup["claimed"] and not self._counts.episodes and not self._all_dropped()

    def _all_dropped(self) -> int:
        return self._counts.dropped + self._dropped + sum(line.dropped for line in self._lines.values())

    # --- answers ------------------------------------------------------------------------------------------------------

    def _report_closed(self) -> None:
        for line in self._lines.values():
            send_answer(line.socket, None, self._counts, closed=True)
        self._report(closed=True)

    def _report(self, closed: bool, refused: Mapping[str, Any] | None = None) -> None:
        self._reported = self._counts.ended
        folder = "" if self._folder is None else str(self._folder.path)
        answer = {"folder": folder, **vars(self._counts), "dropped": self._all_dropped(), "closed": closed}
        answer["refused"] = refused
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._program.send(codec.encode(answer))


def check_shape(shape: TapeShape, line: Line, leaves: tuple[Sequence[Leaf], Sequence[Leaf]]) -> None:
    """Refuse a tape that is not of the envs of its line, or larger than it may be.

    Raises:
        ValueError: it is.
    """
    if shape.places != len(line.env_ids) or shape.films not in (0, len(line.film)):
        raise ValueError(f"it has {shape.places} envs and {shape.films} films")
    if shape.films and not is_frame(shape.frame):
        raise ValueError(f"its frames are {shape.frame}")
    if [*map(list, shape.leaves())] != [*map(list, leaves)]:
        raise ValueError("its leaves are not those of the spaces")
    if not 1 <= shape.steps <= steps_of(shape, line.queue_bytes):
        raise ValueError(f"a block has {shape.steps} steps")


def _received(end: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, empty once the other end is gone, and the descriptors that came with it."""
    try:
        message, descriptors, _, _ = socket.recv_fds(end, MESSAGE_BYTES_MAX, 1)
    except ConnectionResetError:  # the other end had not read everything; what it sent is still to come
        message, descriptors, _, _ = socket.recv_fds(end, MESSAGE_BYTES_MAX, 1)
    return message, descriptors


def send_answer(line: socket.socket, block: int | None, counts: Counts, closed: bool) -> None:
    """Say what is recorded, and give a block back; one who is gone, or reads nothing, is told nothing."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
        line.send(codec.encode({"block": block, "counts": vars(counts), "closed": closed}))


def _spec_in_json(blob: bytes) -> str:
    """The spec that makes an env again, in JSON; empty if there is none, or it cannot be written down."""
    try:
        spec = codec.decode(blob) if blob else None
        return str(spec.to_json()) if spec is not None else ""
    except Exception:  # of another version of Gymnasium
        return ""


def _fps_of(metadata: object) -> float:
    """Frames a second of an env, if its metadata says so."""
    fps = metadata.get("render_fps") if isinstance(metadata, dict) else None
    return float(fps) if isinstance(fps, (int, float, np.integer, np.floating)) and 0 < fps <= FPS_MAX else FPS


def _read(blob: bytes) -> Any:
    """Decode these bytes as data; an empty map where there are none."""
    try:
        return codec.decode(blob) if blob else {}
    except codec.DecodeError as error:
        return f"not readable: {error}"


def main(descriptor: int) -> None:
    """Record for the program at the other end of this socket."""
    # A session of its own would have a CPU share of its own, too, which SCHED_IDLE does not lower.
    os.setpgid(0, 0)
    import minari  # noqa: F401  which takes a second, in which no step is to wait

    RecorderProcess(socket.socket(fileno=descriptor)).run()
