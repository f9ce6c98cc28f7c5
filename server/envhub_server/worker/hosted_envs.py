"""The envs that a worker hosts, in groups, and the facts about them that all groups of the worker share."""

from __future__ import annotations

from typing import Any, NamedTuple

from envhub.values import codec, spaces
from envhub_server.worker.batch_observer import BatchObserver
from envhub_server.worker.env_batch import RowGroup


class SessionSpaces(NamedTuple):
    """The spaces of the session, which its envs' spaces must match in the observation mode."""

    observation: Any
    action: Any
    mode: str

    def check(self, env: Any) -> None:
        """Compare an env's spaces with them.

        Raises:
            SpaceMismatch: the env's spaces do not match.
        """
        spaces.check_equivalent(env.observation_space, self.observation, self.mode)
        spaces.check_action_space(env.action_space, self.action, self.mode)


class HostedEnvs:
    """The envs of one worker.

    Attributes:
        number: the worker's number in its session; None if the worker only lists names.
        build: the message by which the envs are built; None before it came.
        groups: the envs; empty once another worker serves their rows.
        observers: see ``batch_observer``; called in this order.
        spaces: of the session; only once an arena is mapped.
    """

    spaces: SessionSpaces

    def __init__(self) -> None:
        self.number: int | None = None
        self.build: Any = None
        self.groups: list[RowGroup] = []
        self.observers: tuple[BatchObserver, ...] = ()

    @property
    def indices(self) -> list[int]:
        """All rows of the worker."""
        return [index for group in self.groups for index in group.indices]

    @property
    def allow_pickle(self) -> bool:
        """True if the envs are those of the hub's own program."""
        return bool(self.build.allow_pickle)

    @property
    def exact(self) -> codec.Unknown:
        """The encoding of values that a ``repr`` must not replace."""
        return codec.as_pickle if self.allow_pickle else codec.refuse

    @property
    def tick(self) -> int:
        """The ``tick`` of the observer that has one; -1 if none has."""
        return max((observer.tick for observer in self.observers), default=-1)

    def observe(self, observer: BatchObserver) -> None:
        """Add an observer."""
        self._set_observers((*self.observers, observer))

    def remove(self, observer: BatchObserver) -> None:
        """Undo ``observe``."""
        self._set_observers(tuple(each for each in self.observers if each is not observer))

    def _set_observers(self, observers: tuple[BatchObserver, ...]) -> None:
        self.observers = observers
        for group in self.groups:
            group.observers = observers

    def clear(self) -> None:
        """Forget the groups and the observers, which refer to each other and to the arena."""
        self._set_observers(())
        self.groups.clear()
