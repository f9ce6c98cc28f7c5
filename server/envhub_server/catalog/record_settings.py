"""Recording of an environment's sessions by the operator."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from envhub.recording.options import RecordOptions


@dataclass(frozen=True)
class RecordSettings:
    """The table ``record`` of a hub's file; its keys and their defaults are those of ``envhub.RecordOptions``.

    Attributes:
        folder: the folder, on the hub's machine. Each session makes ``recording-vN`` in it.
        env_ids, every, only, film, bytes_max, episodes_max, folder_bytes_max, queue_bytes: as of
            ``envhub.RecordOptions``, of each session; envs that a session does not have are left out.
    """

    folder: Path
    env_ids: tuple[int, ...] | None = None
    every: int = 1
    only: Literal["all", "failed"] = "all"
    film: tuple[int, ...] = ()
    bytes_max: int = RecordOptions.bytes_max
    episodes_max: int = RecordOptions.episodes_max
    folder_bytes_max: int = RecordOptions.folder_bytes_max
    queue_bytes: int = RecordOptions.queue_bytes

    def of_session(self, num_envs: int) -> RecordOptions | None:
        """Options of the recording of a session of this many envs; None where it has none of the recorded envs."""
        chosen = [env for env in range(num_envs) if self.env_ids is None or env in self.env_ids]
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        film = [env for env in self.film if env in chosen]
        return RecordOptions(**{**said, "env_ids": chosen, "film": film}) if chosen else None
