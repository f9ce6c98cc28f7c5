"""What a trainer is told of an env whose episode was cut short: a value of ``infos["env_failure"]``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EnvFailure(Mapping[str, Any]):
    """Why an env was truncated although its episode had not ended; also a read-only mapping of its fields.

    It is no ``dict``, so that ``VectorEnv._add_info`` lays several out as an object array with one entry per env.

    Attributes:
        cause: ``"crash"``, ``"timeout"``, ``"exception"``, ``"hub_lost"``, ``"nan"`` or ``"invalid_observation"``.
        message: what happened, for people.
        signal: the name of the signal that ended the env's process, if one did.
        exit_status: the status that the env's process exited with, if it did.
        exception: the qualified name of the class of what the env raised, if it did.
        traceback: where it raised, or where it was stuck.
        restarts: how many times the env was made again before this.
        log_tail: what its process wrote last.
    """

    cause: str
    message: str
    signal: str = ""
    exit_status: int | None = None
    exception: str = ""
    traceback: str = ""
    restarts: int = 0
    log_tail: str = ""

    @classmethod
    def from_map(cls, found: Mapping[str, Any]) -> EnvFailure:
        """The failure that a hub describes by a map: unknown keys are ignored, and missing ones have their default."""
        known = {name: found[name] for name in _FIELDS if name in found}
        return cls(**{"cause": "", "message": "", **known})

    def __getitem__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_FIELDS)

    def __len__(self) -> int:
        return len(_FIELDS)


_FIELDS = tuple(field.name for field in dataclasses.fields(EnvFailure))
