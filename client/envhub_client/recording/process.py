"""The process that records: it reads batches of steps, and writes the episodes that end in them.

It belongs to a program, at the other end of its only socket. It runs only when no other process wants the CPU, until
the recording is closed or the program has ended, however that was: then it takes a normal share of the CPU, writes
what is complete, and ends, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict, Discrete, Text, Tuple

from envhub.process import keep_large_blocks
from envhub.values import codec, spaces
from envhub_client.recording.episodes import SAME_STEP, Episode, EpisodeCutter, Film, mapped, step_of

STAGING, ABOUT, BEGINS = ".unfinished", "recording.json", "recording-v"

# Compressed, an episode of Atari frames has less than a hundredth of its bytes, and is written in a third to a tenth of
# the time. Numbers that look random stay as large, and take about as long.
COMPRESSION = "zstd"


def claim(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    taken = [each.name[len(BEGINS) :] for each in folder.glob(f"{BEGINS}*")]
    number = max((int(each) + 1 for each in taken if each.isdecimal()), default=0)
    while True:
        with contextlib.suppress(FileExistsError):
            (made := folder / f"{BEGINS}{number}").mkdir()
            return made
        number += 1


def bytes_of_all(folder: Path) -> int:
    nbytes = 0
    for path in folder.glob(f"{BEGINS}*/**/*"):
        with contextlib.suppress(FileNotFoundError):
            nbytes += path.lstat().st_size
    return nbytes


def write_json(path: Path, value: object) -> None:
    """Replace the file by this value, as a whole; of what JSON has no form for it has the ``repr``."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(json.dumps(value, indent=1, default=repr), encoding="utf-8")
    hidden.replace(path)


def give_up(folder: Path, counts: Mapping[str, Any]) -> dict[str, Any]:
    """Remove what a process that was ended has not finished, and note these counts; returns what it has written."""
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    written = {}
    with contextlib.suppress(OSError):  # it has not begun
        metadata = json.loads((folder / "data/metadata.json").read_text())
        written = {"episodes": metadata["total_episodes"], "nbytes": metadata["recorded_bytes"]}
        about = json.loads((folder / ABOUT).read_text())
        write_json(folder / ABOUT, {**about, **counts, **written})
    return written


# Everything is written under a hidden name, and then renamed: whatever ends the process, an episode is there as a
# whole, or not at all. ``data/metadata.json``, which is replaced last, says how many episodes the data set has.
class RecordingFolder:
    """The folder of one recording: a Minari data set, films, and what they are of. Minari 0.5.4 is known to read it."""

    def __init__(self, path: Path, spaces: tuple[Space[Any], Space[Any]], spec: str, fps: float) -> None:
        """Begin with an empty data set; from ``spec``, in JSON, its env can be made again; empty for none."""
        self.path = path
        self._spaces, self._fps, self._staging, self._filmed = spaces, fps, path / STAGING, 0
        self._staging.mkdir()
        (path / "films").mkdir()
        from minari import create_dataset_from_buffers

        os.environ["MINARI_DATASETS_PATH"] = str(self._staging)  # of this process, which does nothing else
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)  # of what was not given, such as authors
            create_dataset_from_buffers(
                path.name,
                [],
                observation_space=spaces[0],
                action_space=spaces[1],
                data_format="arrow",
                jpeg_encoding=False,
            )
        (self._staging / path.name / "data").rename(self._staging / "data")
        self._metadata = json.loads((self._staging / "data/metadata.json").read_text())
        self._metadata |= {"env_spec": spec} if spec else {}  # given to Minari, it would make the env here
        (self._staging / "data").rename(path / "data")
        self._count(0, 0, 0)

    def _count(self, episodes: int, steps: int, nbytes: int) -> None:
        totals = {"total_episodes": episodes, "total_steps": steps, "dataset_size": round(nbytes / 1e6, 1)}
        write_json(self.path / "data/metadata.json", {**self._metadata, **totals, "recorded_bytes": nbytes})
        self.episodes, self._steps, self.nbytes = episodes, steps, nbytes

    def add(self, episode: Episode) -> None:
        number, staged = self.episodes, self._staging / "episode"
        write_episode(staged, number, episode, self._spaces)
        nbytes = sum(file.stat().st_size for file in staged.iterdir())
        if episode.film is not None:
            film = episode.film.finish()
            nbytes += film.stat().st_size
            film.rename(self.path / f"films/episode-{number:06}.mp4")
        staged.rename(self.path / f"data/{number}")
        self._count(number + 1, self._steps + episode.steps, self.nbytes + nbytes)

    def film(self, height: int, width: int) -> Film:
        self._filmed += 1
        return Film(self._staging / f"{self._filmed}.mp4", self._fps, height, width)

    def close(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)


def write_episode(folder: Path, number: int, episode: Episode, spaces: tuple[Space[Any], Space[Any]]) -> None:
    """Make ``folder`` with the file of an episode, which has a step at least, and its metadata."""
    import pyarrow as pa  # which the program need not have

    terminations, truncations = np.zeros((2, episode.steps), bool)
    terminations[-1], truncations[-1] = episode.flags
    truncations[-1] |= not terminations[-1]  # of an episode that was cut
    columns = {
        "observations": _column(spaces[0], map(np.concatenate, episode.observations)),
        "actions": _column(spaces[1], map(_padded, episode.actions)),
        "rewards": _padded(episode.rewards),
        "terminations": _padded([terminations]),
        "truncations": _padded([truncations]),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    folder.mkdir()
    options = pa.ipc.IpcWriteOptions(compression=COMPRESSION, use_threads=False)
    with pa.ipc.new_file(str(folder / "part-0.arrow"), batch.schema, options=options) as file:
        file.write_batch(batch)
    about = {"id": number, "total_steps": episode.steps, "env_id": episode.env_id, "ended": episode.ended}
    about |= {"failure": episode.failure, "episode": episode.number}
    for name in ("seed", "branched_from"):
        if (value := getattr(episode, name)) is not None:
            about[name] = value
    (folder / "metadata.json").write_text(json.dumps(about), encoding="utf-8")


def _padded(parts: list[np.ndarray]) -> np.ndarray:
    """The parts of a column of steps, and a last row of zeros: an episode has one observation more than steps."""
    return np.concatenate([*parts, np.zeros((1, *parts[0].shape[1:]), parts[0].dtype)])


def _column(space: Space[Any], leaves: Iterator[np.ndarray]) -> Any:
    """The next leaves as the column of a space: nested as it is, with an array of numbers as a list in each row."""
    import pyarrow as pa

    if isinstance(space, (Dict, Tuple)):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        columns = {str(name): _column(part, leaves) for name, part in parts}
        return pa.StructArray.from_arrays([*columns.values()], names=[*columns])
    leaf = next(leaves)
    if isinstance(space, (Discrete, Text)):
        return pa.array(leaf)
    rows = leaf.reshape(len(leaf), -1)
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


MESSAGE_BYTES_MAX = 1 << 16
KEPT_BYTES_MAX = 1 << 30  # of memory that episodes have used
LOOK_S = 10.0  # between looks at what the other recordings in the folder hold
FPS, FPS_MAX = 30.0, 1000.0  # of films of an env that does not say, or not sensibly


class Recorder:
    """Records for one program."""

    def __init__(self, program: socket.socket, setup: Mapping[str, Any], memory: int) -> None:
        both = spaces.build(setup["spaces"][0]), spaces.build(setup["spaces"][1])
        about, frames = setup["about"], setup["frames"]
        env_ids, mode = about["env_ids"], about["autoreset_mode"]
        step = step_of(both, len(env_ids), mode == SAME_STEP, frames)
        self._batches = mapped(memory, step, setup["steps"])
        film_of = {env_ids.index(env): n for n, env in enumerate(setup["film"])} if frames else {}
        self._kept = ["failed", *(["terminated", "truncated", "cut"] if about["only"] == "all" else [])]
        self._cutter = EpisodeCutter(env_ids, mode, about["every"], self._kept, film_of, self._film)
        self._program, self._setup, self._limits = program, setup, setup["limits"]
        fps = setup["fps"]
        fps = float(fps) if isinstance(fps, (int, float, np.integer, np.floating)) and 0 < fps <= FPS_MAX else FPS
        self._folder = RecordingFolder(Path(setup["folder"]), both, setup["spec"], fps)
        self._ended = ""  # why nothing more is recorded
        self._dropped, self._taken = 0, -1  # episodes, and the number of the last batch
        self._others_bytes, self._look_s = 0, 0.0  # of the other recordings in the folder, and when to look again
        self._check_limits()
        self._write_about(closed=False)

    def run(self) -> None:
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
        message, descriptors, *_ = socket.recv_fds(self._program, MESSAGE_BYTES_MAX, 1)
        if not message:
            use_normal_priority(os.getpid())
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
            details = {(step, row): detail for step, row, detail in codec.decode(file.read())}
        if order["number"] > self._taken:  # else an interrupted program has said it again
            self._taken = order["number"]
            self._keep(self._cutter.take(self._batches[order["batch"]], order["steps"], details))
            while self._cutter.nbytes > self._limits["queue_bytes"]:
                self._keep([self._cutter.drop_smallest()])
        self._tell(order["batch"])
        return True

    def _keep(self, ended: Iterable[Episode]) -> None:
        for episode in ended:
            self._dropped += episode.ended == "dropped"
            if episode.steps and episode.ended in self._kept and not self._ended:
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
            episode.film = self._folder.film(*frames.shape[1:3])
        episode.film.add(frames)

    def _check_limits(self) -> None:
        if time.monotonic() > self._look_s:
            self._others_bytes = max(0, bytes_of_all(self._folder.path.parent) - self._folder.nbytes)
            self._look_s = time.monotonic() + LOOK_S
        episodes, nbytes = self._folder.episodes, self._folder.nbytes
        reached = {"episodes_max": episodes, "bytes_max": nbytes, "folder_bytes_max": self._others_bytes + nbytes}
        for setting, count in reached.items():
            if count >= self._limits[setting]:
                self._ended = f"{setting}={self._limits[setting]} is reached"

    def _counts(self) -> dict[str, Any]:
        folder, dropped = self._folder, self._dropped + self._cutter.dropped
        return {"episodes": folder.episodes, "nbytes": folder.nbytes, "dropped": dropped, "ended": self._ended}

    def _write_about(self, closed: bool) -> None:
        write_json(self._folder.path / ABOUT, {**self._setup["about"], **self._counts(), "closed": closed})

    def _tell(self, batch: int | None = None, closed: bool = False) -> None:
        """Give a batch back, and tell the counts; a program that is gone is told nothing."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._program.send(codec.encode({"batch": batch, "closed": closed, **self._counts()}))


def use_normal_priority(pid: int) -> None:
    """Let a process that records run at normal priority: no step waits for a CPU then, and it may take minutes else."""
    for thread in os.listdir(f"/proc/{pid}/task"):  # those of encoders, too
        with contextlib.suppress(OSError):  # of a user who may not do that, or of a thread that has ended
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def main(descriptor: int) -> None:
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
