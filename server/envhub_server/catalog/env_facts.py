"""Envs that sessions of this hub have made, and what later sessions of the same envs need to know. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from envhub.protocol.messages import Make

ENVS_MAX = 512  # the one used longest ago is forgotten for a new one


@dataclass(frozen=True)
class EnvFacts:
    """Facts about an env that was made before.

    Attributes:
        libraries: the libraries that its workers share; None if unknown.
        alone: True if a process could not make two of them.
    """

    libraries: tuple[str, ...] | None = None
    alone: bool = False


def key(make: Make) -> str:
    """The key of a session's env; empty if the env cannot be told from others."""
    if (make.factories or make.runner) and not make.factories_digest:
        return ""
    names = [make.name, make.factories_digest, *make.wrappers]
    fields = [*(name.encode() for name in names), make.kwargs, *make.wrapper_kwargs, *make.kwargs_each]
    lengths = ",".join(str(len(field)) for field in fields)
    return hashlib.sha256(b"".join([lengths.encode(), *fields])).hexdigest()


class EnvFactsTable:
    """Facts about the envs that were used last."""

    def __init__(self) -> None:
        self._envs: dict[str, EnvFacts] = {}  # in the order of their last use

    def find(self, make: Make) -> EnvFacts:
        """The facts about such envs."""
        at = key(make)
        if facts := self._envs.pop(at, None):
            self._envs[at] = facts
        return facts or EnvFacts()

    def note(self, make: Make, facts: EnvFacts) -> None:
        """Note facts about these envs."""
        if at := key(make):
            self._envs.pop(at, None)
            self._envs[at] = facts
            if len(self._envs) > ENVS_MAX:
                del self._envs[next(iter(self._envs))]
