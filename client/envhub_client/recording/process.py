"""The process that records: it reads batches of steps, and writes the episodes that end in them.

It belongs to a program, at the other end of its only socket. It runs only when no other process wants the CPU, until
the recording is closed or the program has ended, however that was: then it takes a normal share of the CPU, writes
what is complete, and ends, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envhub.process import keep_large_blocks
from envhub.values import codec, spaces
from envhub_client.recording.batches import mapped, step_of
from envhub_client.recording.episodes import SAME_STEP, Episode, EpisodeCutter
from envhub_client.recording.folder import ABOUT, RecordingFolder, bytes_of_all, write_json

MESSAGE_BYTES_MAX = 1 << 16
KEPT_BYTES_MAX = 1 << 30  # of memory that episodes have used
LOOK_S = 10.0  # between looks at what the other recordings in the folder hold
FPS, FPS_MAX = 30.0, 1000.0  # of films of an env that does not say, or not sensibly


class Recorder:
    """Records for one program."""

    def __init__(self, program: socket.socket, setup: Mapping[str, Any], memory: int) -> None:
        """Begin a folder, as ``EpisodeRecording`` says in ``setup``, for the batches in this memory.

        Raises:
            OSError: the folder cannot be written.
        """
        both = spaces.build(setup["spaces"][0]), spaces.build(setup["spaces"][1])
        env_ids, mode, frames = setup["env_ids"], setup["mode"], setup["frames"]
        step = step_of(both, len(env_ids), mode == SAME_STEP, frames)
        self._batches = mapped(memory, step, setup["steps"])
        film_of = {env_ids.index(env): place for place, env in enumerate(setup["film"])} if frames else {}
        self._cutter = EpisodeCutter(env_ids, mode, setup["every"], film_of, self._film)
        self._program, self._setup, self._limits = program, setup, setup["limits"]
        self._folder = RecordingFolder(Path(setup["folder"]), both, setup["spec"], _fps(setup["fps"]))
        self._ended = ""  # why nothing more is recorded
        self._dropped, self._taken = 0, -1  # episodes, and the number of the last batch
        self._others_bytes, self._look_s = 0, 0.0  # of the other recordings in the folder, and when to look again
        self._check_limits()
        self._write_about(closed=False)

    def run(self) -> None:
        """Record until the program closes the recording, or is gone, or a limit is reached."""
        try:
            self._tell()
            while not self._ended and self._take_next():
                pass
        except Exception as error:  # such as of a full disk
            self._ended = f"{type(error).__name__}: {error}"[:1000]
            if not isinstance(error, OSError):
                raise
        finally:
            self._folder.close()
            with contextlib.suppress(OSError):  # the disk may be gone
                self._write_about(closed=True)
            self._tell(closed=True)

    def _take_next(self) -> bool:
        """Take what the program sends next; returns whether more may follow."""
        message, descriptors, *_ = socket.recv_fds(self._program, MESSAGE_BYTES_MAX, 1)
        if not message:
            share_cpu(os.getpid())
            self._ended = "the program ended without closing it"
            self._keep(self._cutter.end_all("dropped"))
            return False
        order = codec.decode(message)
        if not descriptors:
            for row, count in enumerate(order["missed"]):
                self._cutter.miss(row, count)
            self._keep(self._cutter.end_all("dropped" if order["missed"] else "cut"))
            return False
        with os.fdopen(descriptors[0], "rb") as file:
            notes = {(step, row): note for step, row, note in codec.decode(file.read())}
        if order["number"] > self._taken:  # else an interrupted program has said it again
            self._taken = order["number"]
            self._keep(self._cutter.take(self._batches[order["batch"]], order["steps"], notes))
            while self._cutter.nbytes > self._limits["queue_bytes"]:
                self._keep([self._cutter.drop_smallest()])
        self._tell(order["batch"])
        return True

    def _keep(self, ended: Iterable[Episode]) -> None:
        """Write those of the episodes that are wanted."""
        kinds = {"failed"} if self._setup["only"] == "failed" else {"failed", "terminated", "truncated", "cut"}
        for episode in ended:
            self._dropped += episode.ended == "dropped"
            if episode.steps and episode.ended in kinds and not self._ended:
                try:
                    self._folder.add(episode)
                except OSError:
                    self._dropped += 1
                    raise
                self._check_limits()
            elif episode.film is not None:
                episode.film.discard()

    def _film(self, episode: Episode, frames: np.ndarray) -> None:
        if episode.film is None:
            episode.film = self._folder.film()
        episode.film.add(frames)

    def _check_limits(self) -> None:
        if time.monotonic() > self._look_s:
            self._others_bytes = max(0, bytes_of_all(self._folder.path.parent) - self._folder.nbytes)
            self._look_s = time.monotonic() + LOOK_S
        folder = self._folder
        reached = {"episodes_max": folder.episodes, "bytes_max": folder.nbytes}
        for setting, count in {**reached, "folder_bytes_max": self._others_bytes + folder.nbytes}.items():
            if count >= self._limits[setting]:
                self._ended = f"{setting}={self._limits[setting]} is reached"

    def _counts(self) -> dict[str, Any]:
        dropped = self._dropped + self._cutter.dropped
        return {
            "episodes": self._folder.episodes,
            "nbytes": self._folder.nbytes,
            "dropped": dropped,
            "ended": self._ended,
        }

    def _write_about(self, closed: bool) -> None:
        write_json(self._folder.path / ABOUT, {**self._setup["about"], **self._counts(), "closed": closed})

    def _tell(self, batch: int | None = None, closed: bool = False) -> None:
        """Give a batch back, and tell the counts; a program that is gone is told nothing."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._program.send(codec.encode({"batch": batch, "closed": closed, **self._counts()}))


def share_cpu(pid: int) -> None:
    """Let a process that records run at normal priority: no step waits for a CPU then, and it may take minutes else."""
    for thread in os.listdir(f"/proc/{pid}/task"):  # those of encoders, too
        with contextlib.suppress(OSError):  # of a user who may not do that, or of a thread that has ended
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def _fps(fps: object) -> float:
    """Frames a second of an env, if its metadata says so."""
    return float(fps) if isinstance(fps, (int, float, np.integer, np.floating)) and 0 < fps <= FPS_MAX else FPS


def main(descriptor: int) -> None:
    """Record for the program at the other end of this socket."""
    # A session of its own would have a CPU share of its own, too, which SCHED_IDLE does not lower.
    os.setpgid(0, 0)
    import minari  # noqa: F401  which takes a second, in which no step is to wait

    program = socket.socket(fileno=descriptor)
    message, descriptors, *_ = socket.recv_fds(program, MESSAGE_BYTES_MAX, 2)
    if not message:
        return  # nothing was reset
    with os.fdopen(descriptors[0], "rb") as file:
        setup = codec.decode(file.read())
    # The next episodes take as much as those that have ended, whose columns are too large for what malloc keeps.
    keep_large_blocks(min(setup["limits"]["queue_bytes"], KEPT_BYTES_MAX))
    recorder = Recorder(program, setup, descriptors[1])
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # only now: until here the program waits
    recorder.run()
