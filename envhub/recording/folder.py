"""The folder of one recording: a Minari data set, films, and what they are of.

Everything is written under a hidden name, forced to the disk, and then renamed: whatever ends the process or the
machine, an episode is there as a whole, or not at all. ``data/metadata.json``, which is replaced last, says how many
episodes the data set has.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gymnasium import Space

from envhub.recording.episodes import Episode
from envhub.recording.film import Film

STAGING = ".unfinished"
FILMS = "films"
ABOUT = "recording.json"
BEGINS = "recording-v"  # the names of recordings, before their numbers


def bytes_of_all(folder: Path) -> int:
    """The bytes of all recordings in ``folder``, as far as their files are still there."""
    nbytes = 0
    for path in folder.glob(f"{BEGINS}*/**/*"):
        with contextlib.suppress(FileNotFoundError):
            nbytes += path.lstat().st_size
    return nbytes


def claim(folder: Path, mode: int = 0o777) -> Path:
    """Make a new folder in ``folder`` for one recording; both get ``mode`` if they are made here.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode, parents=True, exist_ok=True)
    taken = [each.name[len(BEGINS) :] for each in folder.glob(f"{BEGINS}*")]
    number = max((int(each) + 1 for each in taken if each.isdecimal()), default=0)
    while True:
        try:
            (made := folder / f"{BEGINS}{number}").mkdir(mode)
        except FileExistsError:
            number += 1
        else:
            return made


def recorded_in(folder: Path) -> tuple[int, int]:
    """Count the episodes in the folder of a recording that has ended, and their bytes with their films.

    Raises:
        OSError: it was not begun.
    """
    data = folder / "data"
    episodes = int(json.loads((data / "metadata.json").read_text())["total_episodes"])
    files = [file for number in range(episodes) for file in (data / str(number)).iterdir()]
    films = [_film_of(folder, number) for number in range(episodes)]
    return episodes, sum(file.stat().st_size for file in [*files, *films] if file.exists())


def _film_of(folder: Path, number: int) -> Path:
    return folder / FILMS / f"episode-{number:06}.mp4"


def write_json(path: Path, value: object) -> None:
    """Replace the file by this value, as a whole; of what JSON has no form for it has the ``repr``."""
    hidden = path.with_name(f".{path.name}")
    with hidden.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, default=repr)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)


def amend(folder: Path, counts: Mapping[str, Any]) -> None:
    """Replace some of what ``recording.json`` says of a recording whose process has ended.

    Raises:
        OSError: it was not begun.
    """
    about = json.loads((folder / ABOUT).read_text())
    write_json(folder / ABOUT, {**about, **counts})


class RecordingFolder:
    """The folder while it is written.

    Attributes:
        episodes: how many it has.
        nbytes: of all of them, and their films.
    """

    def __init__(
        self, path: Path, spec: str, observation_space: Space[Any], action_space: Space[Any], fps: float
    ) -> None:
        """Begin with an empty data set, from which ``spec``, in JSON, can be made again; empty for none.

        Raises:
            OSError: the folder cannot be written.
            Exception: Minari has no form for a space.
        """
        self.path, self.episodes, self.nbytes, self._fps = path, 0, 0, fps
        self._steps = 0
        self._spaces = observation_space, action_space
        self._staging = path / STAGING
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # for ``remove_leftovers``
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._staging.mkdir()
        remove_leftovers(path.parent)
        (path / FILMS).mkdir()
        self._make_empty()
        self._metadata = json.loads((path / "data" / "metadata.json").read_text())
        if spec and not _is_of_vector_env(spec):
            self._metadata["env_spec"] = spec  # given to Minari, it would make the env here
            write_json(path / "data" / "metadata.json", self._metadata)

    def _make_empty(self) -> None:
        """Make an empty data set, and move it to its place as a whole."""
        from minari import create_dataset_from_buffers

        os.environ["MINARI_DATASETS_PATH"] = str(self._staging)  # of this process, which does nothing else
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)  # of what was not given, such as authors
            create_dataset_from_buffers(
                self.path.name,
                [],
                observation_space=self._spaces[0],
                action_space=self._spaces[1],
                data_format="arrow",
                jpeg_encoding=False,
            )
        (self._staging / self.path.name / "data").rename(self.path / "data")

    def add(self, episodes: Sequence[Episode]) -> None:
        """Add ended episodes, with their films; all are forced to the disk at once, which takes as long as for one.

        Raises:
            OSError: the disk is full, or gone.
        """
        if not episodes:
            return
        data = self.path / "data"
        numbered = enumerate(episodes, self.episodes)
        moves = [move for number, episode in numbered for move in self._stage(number, episode)]
        sync_filesystem(self._staging)
        for staged, place in moves:
            if place.is_dir():  # of a process that ended before it could count it
                shutil.rmtree(place)
            staged.rename(place)
        sync_filesystem(data)
        self.episodes += len(episodes)
        self._steps += sum(episode.steps for episode in episodes)
        totals = {
            "total_episodes": self.episodes,
            "total_steps": self._steps,
            "dataset_size": round(self.nbytes / 1e6, 1),
        }
        write_json(data / "metadata.json", {**self._metadata, **totals})

    def _stage(self, number: int, episode: Episode) -> list[tuple[Path, Path]]:
        """Write an episode under hidden names; returns its film, if it has one, and its folder, with their places."""
        from envhub.recording.episode_file import write_episode  # and with it pyarrow, which the program need not have

        folder = self._staging / "episodes" / str(number)
        write_episode(folder, number, episode, self._spaces)
        films = [] if episode.film is None else [episode.film.finish()]
        self.nbytes += sum(file.stat().st_size for file in (*films, *folder.iterdir()))
        moves = [(film, _film_of(self.path, number)) for film in films]
        return [*moves, (folder, self.path / "data" / str(number))]

    def film(self, name: str) -> Film:
        """A film of an episode that has just begun."""
        return Film(self._staging / f"{name}.mp4", self._fps)

    def close(self) -> None:
        """Remove what is not finished."""
        shutil.rmtree(self._staging, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Remove it as a whole, which is closed."""
        shutil.rmtree(self.path, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what recordings in this folder did not finish whose processes have ended."""
    for recording in folder.glob(f"{BEGINS}*"):
        if not recording.name[len(BEGINS) :].isdecimal():  # a folder of another kind
            continue
        with contextlib.suppress(OSError):  # a process writes it, or it is another user's
            lock = os.open(recording, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(f"/proc/self/fd/{lock}/{STAGING}", ignore_errors=True)
            finally:
                os.close(lock)


def _is_of_vector_env(spec: str) -> bool:
    """True if a spec, in JSON, makes a vector env, and so none whose episodes a data set has."""
    return "vectorization_mode" in json.loads(spec).get("kwargs", {})


def sync_filesystem(folder: Path) -> None:
    """Force everything to the disk that was written to the file system of this folder.

    Raises:
        OSError: the disk could not take it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _LIBC.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)


_LIBC = ctypes.CDLL(None, use_errno=True)
