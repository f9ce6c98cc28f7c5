"""The value of ``infos["env_failure"]`` for an env whose episode was cut short, and the info around it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

import numpy as np

from envhub.errors import printable, shortened
from envhub.values import codec

CHARS_MAX = 1 << 14  # of each text; a hub sends no longer ones


@dataclass(frozen=True)
class EnvFailure(Mapping[str, Any]):
    """The reason why an env was truncated before its episode's end; also a read-only mapping of its fields.

    The class is not a ``dict``, so that ``VectorEnv._add_info`` makes one object array of several, with an entry per
    env.

    Attributes:
        cause: ``"crash"``, ``"timeout"``, ``"memory"``, ``"recycle"``, ``"restart"``, ``"exception"``, ``"nan"`` or
            ``"hub_lost"``.
        message: the description of the failure, for people.
        signal: the name of the signal that ended the env's process, or an empty string.
        exit_status: the status that the env's process exited with, or None.
        exception: the qualified name of the class of the exception that the env raised, or an empty string.
        traceback: the place at which the env raised or hung, or an empty string.
        restarts: the number of times that the env's worker had ended, or had built an env again, before this failure.
        log_tail: the last output of the env's process.
        replay: the name of the file on the hub's machine with which ``envhub replay`` runs the env to this failure
            again, written a moment after the failure is reported; empty if the hub keeps none.
        hub: the name of the hub that had the env; None for a private hub, and where the hub's
            name is not known.
    """

    cause: str
    message: str
    signal: str = ""
    exit_status: int | None = None
    exception: str = ""
    traceback: str = ""
    restarts: int = 0
    log_tail: str = ""
    replay: str = ""
    hub: str | None = None

    @classmethod
    def from_map(cls, mapping: Mapping[str, Any], hub: str | None = None) -> EnvFailure:
        """The failure in the map of the hub of this name: unknown keys left out, texts printable and not long."""
        fields = {name: printable(mapping[name]) for name in _FIELDS if name in mapping}
        texts = {name: shortened(text, CHARS_MAX) for name, text in fields.items() if isinstance(text, str)}
        return cls(**{"cause": "", "message": "", "hub": hub, **fields, **texts})

    def __getitem__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_FIELDS)

    def __len__(self) -> int:
        return len(_FIELDS)


_FIELDS = tuple(field.name for field in dataclasses.fields(EnvFailure))


def failure_info(failure: EnvFailure) -> bytes:
    """The encoded info of a row that is truncated for this failure, the same from hub, worker and client."""
    fields = {name: value for name, value in failure.items() if name != "hub" or value is not None}
    return codec.encode({"env_failure": fields, "invalid_transition": True})


def reseeded(seed: int | None, incarnation: int, losses: int = 0) -> int | None:
    """The seed of an env that is built again, for the ``incarnation``-th time after ``losses`` of its session.

    It follows from these numbers, so that a run can be repeated, and is another one, so that the env does not run into
    the same crash. It has 31 bits: ``np.random.RandomState``, ALE and EnvPool take no more.
    """
    if seed is None or not (incarnation or losses):
        return seed
    key = (incarnation, losses) if losses else (incarnation,)
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint32)[0] >> np.uint32(1))
