"""The folder of one recording: a Minari data set, films, and what they are of. Known to be read by Minari 0.5.4.

Everything is written under a hidden name, and then renamed: whatever ends the process, an episode is there as a whole,
or not at all. ``data/metadata.json``, which is replaced last, says how many episodes the data set has.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict, Discrete, Text, Tuple

from envhub.film import Film
from envhub_client.recording.episodes import Episode

STAGING, ABOUT, BEGINS = ".unfinished", "recording.json", "recording-v"

# Compressed, an episode of Atari frames has less than a hundredth of its bytes, and is written in a third to a tenth of
# the time. Numbers that look random stay as large, and take about as long.
COMPRESSION = "zstd"


def claim(folder: Path) -> Path:
    """Make a new folder in ``folder`` for one recording.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = [each.name[len(BEGINS) :] for each in folder.glob(f"{BEGINS}*")]
    number = max((int(each) + 1 for each in taken if each.isdecimal()), default=0)
    while True:
        try:
            (made := folder / f"{BEGINS}{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return made


def bytes_of_all(folder: Path) -> int:
    """The bytes of all recordings in ``folder``, as far as their files are still there."""
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


class RecordingFolder:
    """The folder while it is written.

    Attributes:
        episodes: how many it has.
        nbytes: of all of them, and their films.
    """

    def __init__(self, path: Path, spaces: tuple[Space[Any], Space[Any]], spec: str, fps: float) -> None:
        """Begin with an empty data set; from ``spec``, in JSON, its env can be made again; empty for none.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path = path
        self._spaces, self._fps, self._staging, self._filmed = spaces, fps, path / STAGING, 0
        self._staging.mkdir()
        (path / "films").mkdir()
        self._make_empty()
        self._metadata = json.loads((self._staging / "data/metadata.json").read_text())
        self._metadata |= {"env_spec": spec} if spec else {}  # given to Minari, it would make the env here
        (self._staging / "data").rename(path / "data")
        self._count(0, 0, 0)

    def _make_empty(self) -> None:
        from minari import create_dataset_from_buffers

        os.environ["MINARI_DATASETS_PATH"] = str(self._staging)  # of this process, which does nothing else
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)  # of what was not given, such as authors
            observation_space, action_space = self._spaces
            create_dataset_from_buffers(
                self.path.name,
                [],
                observation_space=observation_space,
                action_space=action_space,
                data_format="arrow",
                jpeg_encoding=False,
            )
        (self._staging / self.path.name / "data").rename(self._staging / "data")

    def _count(self, episodes: int, steps: int, nbytes: int) -> None:
        totals = {"total_episodes": episodes, "total_steps": steps, "dataset_size": round(nbytes / 1e6, 1)}
        write_json(self.path / "data/metadata.json", {**self._metadata, **totals, "recorded_bytes": nbytes})
        self.episodes, self._steps, self.nbytes = episodes, steps, nbytes

    def add(self, episode: Episode) -> None:
        """Add an ended episode, with its film.

        Raises:
            OSError: the disk is full, or gone; the data set does not count the episode.
        """
        number, staged = self.episodes, self._staging / "episode"
        write_episode(staged, number, episode, self._spaces)
        nbytes = sum(file.stat().st_size for file in staged.iterdir())
        if episode.film is not None:
            film = episode.film.finish()
            nbytes += film.stat().st_size
            film.rename(self.path / f"films/episode-{number:06}.mp4")
        staged.rename(self.path / f"data/{number}")
        self._count(number + 1, self._steps + episode.steps, self.nbytes + nbytes)

    def film(self) -> Film:
        """A film of an episode that has just begun."""
        self._filmed += 1
        return Film(self._staging / f"{self._filmed}.mp4", self._fps)

    def close(self) -> None:
        """Remove what is not finished."""
        shutil.rmtree(self._staging, ignore_errors=True)


def write_episode(folder: Path, number: int, episode: Episode, spaces: tuple[Space[Any], Space[Any]]) -> None:
    """Make ``folder`` with the file of an episode, which has a step at least, and its metadata.

    Raises:
        OSError: the folder cannot be written.
    """
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
    about |= {"failure": episode.failure} | ({} if episode.seed is None else {"seed": episode.seed})
    (folder / "metadata.json").write_text(json.dumps(about), encoding="utf-8")


def _padded(parts: list[np.ndarray]) -> np.ndarray:
    """The parts of a column of steps, and a last row of zeros: an episode has one observation more than steps."""
    return np.concatenate([*parts, np.zeros_like(parts[0][:1])])


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
