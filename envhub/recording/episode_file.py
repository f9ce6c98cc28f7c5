"""The file of one episode, as Minari has it in its format "arrow". Known to be read by Minari 0.5.4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from gymnasium import Space
from gymnasium.spaces import Dict, Discrete, Tuple

from envhub.recording.episodes import Episode

# Compressed, an episode of Atari frames has less than a hundredth of its bytes, and is written in a third to a tenth of
# the time. Numbers that look random stay as large, and take about as long.
COMPRESSION = "zstd"


def write_episode(folder: Path, number: int, episode: Episode, spaces_of_one: tuple[Space[Any], Space[Any]]) -> None:
    """Make ``folder`` with the file of the episode, and its metadata.

    Args:
        folder: does not exist.
        number: of the episode in its data set.
        episode: has at least one step.
        spaces_of_one: of observations and of actions.

    Raises:
        OSError: the folder cannot be written.
    """
    observation_space, action_space = spaces_of_one
    columns = {
        "observations": _column(observation_space, map(np.concatenate, episode.observations)),
        "actions": _column(action_space, map(_padded, episode.actions)),
        "rewards": _padded(episode.rewards),
    }
    flags = episode.terminations_and_truncations()
    columns["terminations"], columns["truncations"] = (_padded([flag]) for flag in flags)
    batch = pa.RecordBatch.from_pydict(columns)
    folder.mkdir(parents=True)
    options = pa.ipc.IpcWriteOptions(compression=COMPRESSION, use_threads=False)
    with pa.ipc.new_file(str(folder / "part-0.arrow"), batch.schema, options=options) as file:
        file.write_batch(batch)
    about = {"id": number, "total_steps": episode.steps, "env_id": episode.env_id, "ended": episode.ended}
    about |= {"failure": episode.failure} | ({} if episode.seed is None else {"seed": episode.seed})
    (folder / "metadata.json").write_text(json.dumps(about), encoding="utf-8")


def _padded(parts: list[np.ndarray]) -> np.ndarray:
    """The parts of a column of steps, and a last row of zeros: an episode has one observation more than steps."""
    return np.concatenate([*parts, np.zeros_like(parts[0][:1])])


def _column(space: Space[Any], leaves: Iterator[np.ndarray]) -> pa.Array:
    """The next leaves as the column of a space: nested as it is, with an array of numbers as a list in each row."""
    if isinstance(space, (Dict, Tuple)):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        columns = {str(name): _column(part, leaves) for name, part in parts}
        return pa.StructArray.from_arrays([*columns.values()], names=[*columns])
    leaf = next(leaves)
    if isinstance(space, Discrete):
        return pa.array(leaf)
    rows = leaf.reshape(len(leaf), -1)
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
