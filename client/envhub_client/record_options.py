"""Options of a recording, and its results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from envhub.errors import brief
from envhub_client.keywords import check, check_choice, whole_number

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
            not ended. Where either is full, whole episodes are dropped, and counted. An episode takes its size once
            more while it is written.
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
        """Check what does not depend on the envs, and take numbers of NumPy as ints, which can be written as JSON."""
        check(isinstance(self.folder, (str, os.PathLike)), "folder", "a path", self.folder, TypeError)
        folder = os.fsdecode(self.folder)
        if not folder:
            raise ValueError('folder is empty; "." is the working directory')
        if "://" in folder:
            raise ValueError("folder must be a path, and is a URL")
        if "\0" in folder:
            raise ValueError(f"folder has a null character: {brief(folder)}")
        check_choice("only", self.only, ("all", "failed"))
        for name in ("env_ids", "film"):
            if (numbers := getattr(self, name)) is not None:
                are_many = hasattr(numbers, "__iter__") and not isinstance(numbers, str)
                check(are_many, name, "numbers of envs, such as [0, 1]", numbers, TypeError)
                object.__setattr__(self, name, tuple(whole_number(f"each of {name}", number) for number in numbers))
        for name in ("every", "bytes_max", "episodes_max", "folder_bytes_max", "queue_bytes"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))

    def chosen(self, num_envs: int) -> list[int]:
        """The envs that are recorded, ascending."""
        chosen = sorted({*range(num_envs)} if self.env_ids is None else {*self.env_ids})
        are_known = bool(chosen) and 0 <= chosen[0] <= chosen[-1] < num_envs
        check(are_known, "env_ids", f"numbers from 0 to {num_envs - 1}", self.env_ids)
        if strange := {*self.film} - {*chosen}:
            raise ValueError(f"film has envs that are not recorded: {sorted(strange)}")
        return chosen


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
    episodes: int = 0
    nbytes: int = 0
    dropped: int = 0
    ended: str = ""
