"""The folder of one recording: a Minari data set, films, and what they are of.

Everything is written under a hidden name, forced to the disk, and then renamed: whatever ends the process or the
machine, an episode is there as a whole, or not at all. ``data/metadata.json``, which is replaced last, says how many
episodes the data set has.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec

from envhub.values import spaces
from envhub_client.recording.episodes import Episode
from envhub_client.recording.film import Film

STAGING = ".unfinished"
FILMS = "films"
ABOUT = "recording.json"


def claim(folder: Path) -> Path:
    """A new folder in ``folder`` for a recording, which nobody else gets.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            (made := folder / f"recording-v{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return made


def write_json(path: Path, value: Any) -> None:
    """Replace the file by this value, as a whole; of what JSON has no form for it has the ``repr``."""
    hidden = path.with_name(f".{path.name}")
    with hidden.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, default=repr)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)


class RecordingFolder:
    """The folder while it is written.

    Attributes:
        episodes: how many it has.
        nbytes: of all of them, and their films.
    """

    def __init__(
        self, path: Path, spec: str, observation_space: Space[Any], action_space: Space[Any], fps: float
    ) -> None:
        """Begin with an empty data set, by which ``spec``, in JSON, can be made again; empty for none.

        Raises:
            OSError: the folder cannot be written.
            Exception: Minari has no form for a space.
        """
        from minari.data_collector import EpisodeBuffer

        from envhub_client.recording.staging import StagingStorage

        self.path, self.episodes, self.nbytes, self._fps = path, 0, 0, fps
        self._steps = 0
        self._spaces = observation_space, action_space
        self._buffer = EpisodeBuffer
        self._staging = path / STAGING
        self._staging.mkdir()
        (path / FILMS).mkdir()
        with self._making_of(path.name) as made:
            made(observation_space, action_space, spec)
        self._metadata = json.loads((path / "data" / "metadata.json").read_text())
        self._storage = StagingStorage(self._staging / "episodes", *self._spaces, jpeg_encoding=False)

    @contextmanager
    def _making_of(self, name: str) -> Iterator[Any]:
        """A function that makes an empty data set, which is moved to its place at the end."""
        from minari import create_dataset_from_buffers

        def make(observation_space: Space[Any], action_space: Space[Any], spec: str) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=UserWarning)  # of what nobody was asked for, such as authors
                create_dataset_from_buffers(
                    name,
                    [],
                    env=EnvSpec.from_json(spec) if spec else None,
                    observation_space=observation_space,
                    action_space=action_space,
                    data_format="arrow",
                    jpeg_encoding=False,
                )

        os.environ["MINARI_DATASETS_PATH"] = str(self._staging)  # of this process, which does nothing else
        yield make
        (self._staging / name / "data").rename(self.path / "data")

    def add(self, episodes: Sequence[Episode]) -> None:
        """Add ended episodes, with their films; all are forced to the disk at once, which takes as long as for one.

        Raises:
            OSError: the disk is full, or gone.
        """
        if not episodes:
            return
        data = self.path / "data"
        moves = []
        for number, episode in enumerate(episodes, self.episodes):
            staged = self._stage(number, episode)
            moves += [(file, self.path / FILMS / f"episode-{number:06}.mp4") for file in staged if file.suffix]
            moves += [(file, data / str(number)) for file in staged if not file.suffix]
        sync_filesystem(self._staging)
        for staged_at, place in moves:
            if place.is_dir():  # of a process that ended before it could count it
                shutil.rmtree(place)
            staged_at.rename(place)
        sync_filesystem(data)
        self.episodes += len(episodes)
        self._steps += sum(episode.steps for episode in episodes)
        totals = {
            "total_episodes": self.episodes,
            "total_steps": self._steps,
            "dataset_size": round(self.nbytes / 1e6, 1),
        }
        write_json(data / "metadata.json", {**self._metadata, **totals})

    def _stage(self, number: int, episode: Episode) -> list[Path]:
        """Write an episode under its hidden name; returns its folder, and the file of its film, if it has one."""
        terminations, truncations = episode.flags()
        buffer = self._buffer(
            id=number,
            seed=episode.seed,
            observations=_column(self._spaces[0], episode.observations),
            actions=_column(self._spaces[1], episode.actions),
            rewards=np.concatenate(episode.rewards),
            terminations=terminations,
            truncations=truncations,
        )
        self._storage.about = {"env_id": episode.env_id, "ended": episode.ended, "failure": episode.failure}
        self._storage.update_episodes([buffer])
        written = [self._staging / "episodes" / str(number)]
        if episode.film is not None:
            written.append(episode.film.finish())
        self.nbytes += sum(file.stat().st_size for file in (*written[0].iterdir(), *written[1:]))
        return written

    def film(self, name: str) -> Film:
        """A film of an episode that has just begun."""
        return Film(self._staging / f"{name}.mp4", self._fps)

    def close(self) -> None:
        """Remove what is not finished."""
        shutil.rmtree(self._staging, ignore_errors=True)


def _column(space: Space[Any], leaves: list[list[np.ndarray]]) -> Any:
    """The column of a space as Minari takes it: an array for each leaf, nested as the space is."""
    return spaces.assemble(space, (np.concatenate(parts) for parts in leaves))


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
