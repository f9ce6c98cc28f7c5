"""Options of a recording, and what came of it."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from envhub.errors import shown

GIB = 1 << 30


@dataclass(frozen=True)
class RecordOptions:
    """Options of ``envhub.make_vec(..., record=RecordOptions(...))``; ``record=FOLDER`` has the defaults.

    Attributes:
        folder: a folder of this machine. Each session makes ``recording-v0``, ``recording-v1`` ... in it.
        env_ids: the envs whose episodes are recorded; by default all.
        every: ``n`` to record every n-th episode of each env, beginning with its first.
        only: ``"failed"`` keeps only episodes in which the env failed: it crashed, hung, raised or was not finite.
        film: the envs, among those that are recorded, whose episodes are also filmed; each step then renders them.
        bytes_max: the bytes of all episodes and films, after which nothing more is recorded.
        episodes_max: the episodes, after which nothing more is recorded.
        folder_bytes_max: the bytes of all recordings in ``folder`` together, whichever sessions made them, after which
            nothing more is recorded. Each recording looks at them every 10 s.
        queue_bytes: the memory between the program and the process that writes, and as much for episodes that have
            not ended. Where both are full, whole episodes are dropped, and counted. While an episode is written, it
            takes its size once more; that process keeps this memory for the next one.
    """

    folder: str | Path
    env_ids: Sequence[int] | None = None
    every: int = 1
    only: Literal["all", "failed"] = "all"
    film: Sequence[int] = ()
    bytes_max: int = 16 * GIB
    episodes_max: int = 100_000
    folder_bytes_max: int = 64 * GIB
    queue_bytes: int = GIB // 2

    def __post_init__(self) -> None:
        """Check what does not depend on the session.

        Raises:
            TypeError: a value has another type.
            ValueError: a value is out of bounds.
        """
        if not isinstance(self.folder, (str, os.PathLike)):
            raise TypeError(f"folder must be a path, got {shown(self.folder)}")
        if not os.fspath(self.folder):
            raise ValueError('folder is empty; "." is the working directory')
        if "://" in os.fsdecode(self.folder):
            raise ValueError("folder must be a path, and is a URL")
        if "\0" in os.fsdecode(self.folder):
            raise ValueError(f"folder has a null character: {shown(os.fsdecode(self.folder))}")
        for name in ("env_ids", "film"):
            if (numbers := getattr(self, name)) is not None:
                object.__setattr__(self, name, _checked_numbers(name, numbers))
        if self.only not in ("all", "failed"):
            raise ValueError(f"only must be 'all' or 'failed', got {shown(self.only)}")
        for name in ("every", "bytes_max", "episodes_max", "folder_bytes_max", "queue_bytes"):
            number = _checked_number(name, getattr(self, name))
            object.__setattr__(self, name, number)
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")

    @property
    def memory_bytes(self) -> int:
        """Room for what waits for the process that writes, and for episodes under way; 8 steps are kept in any case."""
        return 2 * self.queue_bytes

    def chosen(self, num_envs: int) -> list[int]:
        """The envs that are recorded, ascending.

        Raises:
            ValueError: an env does not exist, or one that is filmed is not recorded.
        """
        chosen = sorted({*range(num_envs)} if self.env_ids is None else {*self.env_ids})
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < num_envs:
            raise ValueError(f"env_ids must be numbers from 0 to {num_envs - 1}, got {shown(self.env_ids)}")
        if strange := {*self.film} - {*chosen}:
            raise ValueError(f"film has envs that are not recorded: {sorted(strange)}")
        return chosen


def _checked_number(name: str, number: Any) -> int:
    """The number as an int: those of NumPy cannot be written as JSON.

    Raises:
        TypeError: it is no whole number.
    """
    text = f"{name} must be a whole number, got {shown(number)}"
    if isinstance(number, bool):
        raise TypeError(text)
    try:
        return operator.index(number)
    except TypeError as error:
        raise TypeError(text) from error


def _checked_numbers(name: str, numbers: Any) -> tuple[int, ...]:
    """These numbers as ints.

    Raises:
        TypeError: they are no sequence of whole numbers.
    """
    if isinstance(numbers, str) or not hasattr(numbers, "__iter__"):
        raise TypeError(f"{name} must be numbers of envs, such as [0, 1], got {shown(numbers)}")
    return tuple(_checked_number(f"each of {name}", number) for number in numbers)


class Recorded(NamedTuple):
    """Counts of what a session has recorded so far.

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
