"""Recording of an environment's sessions by the operator."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from envhub.option_kinds import DISTINCT, EnvIndex, SomeBytes, SomeEpisodes, read_path
from envhub.recording.options import RecordOptions


@dataclass(frozen=True)
class RecordSettings:
    """The table ``record`` of a hub's file.

    Its keys and their defaults are those of ``envhub.RecordOptions``, which describes them. They are those of each
    session; envs that a session does not have are left out. The folder is one of the hub's machine. Each session makes
    ``recording-vN`` in it.
    """

    folder: Path
    env_ids: Annotated[tuple[EnvIndex, ...], DISTINCT] | None = None
    every: SomeEpisodes = 1
    only: Literal["all", "failed"] = "all"
    film: Annotated[tuple[EnvIndex, ...], DISTINCT] = ()
    bytes_max: SomeBytes = RecordOptions.bytes_max
    episodes_max: SomeEpisodes = RecordOptions.episodes_max
    folder_bytes_max: SomeBytes = RecordOptions.folder_bytes_max
    queue_bytes: SomeBytes = RecordOptions.queue_bytes

    def __post_init__(self) -> None:
        """Check that the films are of envs that are recorded.

        Raises:
            ValueError: one is not.
        """
        if strange := {*self.film} - {*(self.film if self.env_ids is None else self.env_ids)}:
            raise ValueError(f"film has {min(strange)}, which is not among env_ids, which are recorded")

    def of_session(self, num_envs: int) -> RecordOptions | None:
        """Options of the recording of a session of this many envs; None where it has none of the recorded envs."""
        chosen = [env for env in range(num_envs) if self.env_ids is None or env in self.env_ids]
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        film = [env for env in self.film if env in chosen]
        return RecordOptions(**{**said, "env_ids": chosen, "film": film}) if chosen else None


def read_recording(text: str, folder: Path) -> RecordSettings | Literal[""]:
    """Return the recording of all episodes in the folder that a text names; an empty text is none.

    Raises:
        ValueError: the text names no path.
    """
    return RecordSettings(read_path(text, folder)) if text else ""
