"""The process that records: it reads blocks of a tape, and writes the episodes that end in them.

It runs only when nobody else wants the CPU. When the program ends, however it does, the socket between them ends, and
the process writes what is complete and ends, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envhub.values import codec, spaces
from envhub_client.recording.episodes import Episode, EpisodeCutter
from envhub_client.recording.folder import ABOUT, RecordingFolder, write_json
from envhub_client.recording.tape import Tape, TapeShape

MESSAGE_BYTES_MAX = 1 << 17
SETUP_BYTES_MAX = 1 << 26
BATCH_BYTES = 1 << 24  # of episodes that are forced to the disk together


@dataclass
class Counts:
    """What was recorded so far, as the program is told.

    Attributes:
        episodes: in the folder.
        nbytes: of the folder.
        dropped: episodes that did not fit into memory beside the others.
        ended: why nothing more is recorded; empty as long as something is.
    """

    episodes: int = 0
    nbytes: int = 0
    dropped: int = 0
    ended: str = ""


class RecorderProcess:
    """Reads the tape of one program."""

    def __init__(self, line: socket.socket, setup: dict[str, Any], tape: Tape) -> None:
        self._line, self._tape = line, tape
        self._limits = setup["limits"]
        self._only_failed = setup["only"] == "failed"
        self._about = codec.decode(setup["about"])
        self._counts = Counts()
        self._filmed = 0
        observation_space, action_space = (spaces.build(codec.decode(blob)) for blob in setup["spaces"])
        path = Path(setup["folder"])
        self._folder = RecordingFolder(path, setup["spec"], observation_space, action_space, setup["fps"])
        env_ids = setup["env_ids"]
        places = {env_ids.index(env): film for film, env in enumerate(setup["film"])}
        self._cutter = EpisodeCutter(tape.shape, env_ids, places, self._add_frames)
        self._write_about()

    def run(self) -> None:
        """Record until the program closes the recording, or is gone.

        Raises:
            Exception: such as of a full disk; the program is told, and what is not finished is removed.
        """
        try:
            self._record()
        except Exception as error:
            self._counts.ended = f"{type(error).__name__}: {error}"[:1000]
            self._folder.close()
            with contextlib.suppress(OSError):  # the disk may be gone; the program is told in any case
                self._write_about()
            send_answer(self._line, None, self._counts, closed=True)
            raise

    def _record(self) -> None:
        send_answer(self._line, None, self._counts, closed=False)
        order = self._order()
        while order is not None:
            self._take(order["block"], order["steps"], order["notes"])
            if order["close"]:
                break
            send_answer(self._line, order["block"], self._counts, closed=False)
            order = self._order()
        else:
            self._take(*self._tape.unfinished(), notes=[])  # the program could not send these any more
        self._keep(self._cutter.cut_all())
        self._folder.close()
        self._write_about(0 if order is None else order["dropped"])
        send_answer(self._line, None, self._counts, closed=True)

    def _order(self) -> Any:
        """The next message; None when the program is gone."""
        try:
            message = self._line.recv(MESSAGE_BYTES_MAX)
        except ConnectionResetError:  # it had not read everything; what it sent is still to come
            message = self._line.recv(MESSAGE_BYTES_MAX)
        return codec.decode(message) if message else None

    def _take(self, block: int, steps: int, notes: list[Any]) -> None:
        by_cell = {(step, place): note for step, place, note in notes}
        self._keep(self._cutter.take(self._tape.blocks[block], steps, by_cell))
        while sum(episode.nbytes for episode in self._cutter.running) > self._limits["held_bytes"]:
            self._keep([self._cutter.drop_largest()])
            self._counts.dropped += 1

    def _keep(self, ended: Iterable[Episode]) -> None:
        """Write those episodes that are wanted, up to ``BATCH_BYTES`` at once."""
        wanted: list[Episode] = []
        for episode in ended:
            if self._is_wanted(episode):
                wanted.append(episode)
            elif episode.film is not None:
                episode.film.discard()
            if sum(each.nbytes for each in wanted) > BATCH_BYTES:
                self._write(wanted)
                wanted = []
        self._write(wanted)

    def _is_wanted(self, episode: Episode) -> bool:
        right = episode.ended == "failed" or not self._only_failed
        return right and episode.steps > 0 and episode.ended != "dropped" and not self._counts.ended

    def _write(self, episodes: list[Episode]) -> None:
        counts, limits = self._counts, self._limits
        self._folder.add(episodes[: limits["episodes_max"] - counts.episodes])
        counts.episodes, counts.nbytes = self._folder.episodes, self._folder.nbytes
        for setting, count in (("episodes_max", counts.episodes), ("bytes_max", counts.nbytes)):
            if count >= limits[setting]:
                counts.ended = f"{setting}={limits[setting]} is reached"

    def _add_frames(self, episode: Episode, frames: np.ndarray) -> None:
        if episode.film is None:
            self._filmed += 1
            episode.film = self._folder.film(str(self._filmed))
        episode.film.add(frames)

    def _write_about(self, dropped: int = 0) -> None:
        counts = {**vars(self._counts), "dropped": self._counts.dropped + dropped}
        write_json(self._folder.path / ABOUT, {**self._about, **counts})


def send_answer(line: socket.socket, block: int | None, counts: Counts, closed: bool) -> None:
    """Tell the program what is recorded, and give a block back; a program that is gone is told nothing."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        line.send(codec.encode({"block": block, "counts": vars(counts), "closed": closed}))


def main(descriptor: int) -> None:
    """Record for the program at the other end of this socket."""
    # Ctrl-C is for the program, and the episodes are to be written. A session of its own would have a CPU share of its
    # own, too, which SCHED_IDLE does not lower.
    os.setpgid(0, 0)
    line = socket.socket(fileno=descriptor)
    import minari  # noqa: F401  which takes a second, before the CPU is left to others

    message, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES_MAX, 2)
    if not message:
        return  # the program ended before it recorded anything
    tape_descriptor, setup_descriptor = descriptors
    with os.fdopen(setup_descriptor, "rb") as file:
        file.seek(0)
        setup = codec.decode(file.read(SETUP_BYTES_MAX))
    tape = Tape(TapeShape.from_wire(setup["shape"]), tape_descriptor)
    os.close(tape_descriptor)
    try:
        recorder = RecorderProcess(line, setup, tape)
    except Exception as error:  # such as a full disk; the program goes on without recording
        ended = f"{type(error).__name__}: {error}"
        send_answer(line, None, Counts(ended=ended[:1000]), closed=True)
        raise
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    recorder.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
