"""Snapshots of a vector env's envs: taken, restored, branched and dropped."""

from __future__ import annotations

import operator
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from envhub.errors import RemoteProtocolError, SnapshotLost, SnapshotRefused, brief
from envhub.protocol import messages
from envhub.protocol.messages import Reset
from envhub_client.envs.arguments import EnvIds, checked_env_ids
from envhub_client.session.pending import exclusive
from envhub_client.session.session import VectorSession


class Snapshot:
    """The state of some envs at one moment, to which they, or others in their place, are restored.

    It lasts as long as the session. The end of a ``with`` block drops it. So does the first reset, or request for
    snapshots, after the last reference to it is gone; but one that another program took is dropped by ``drop`` only.

    Attributes:
        name: its name in the session.
        env_ids: numbers of the envs that were copied.
        steps: of each, how many steps its episode had.
        episode_ids: of each, the number of its episode, which counts its resets.
        ended: of each, whether its episode had ended.
        nbytes: memory that the copies shared with no other process when they were taken.
        depth: how many snapshots that are kept it descends from, itself included.
        problems: of each, why it cannot be restored, or nothing; as of now in those that ``snapshots`` returns.
    """

    _finalizer: weakref.finalize[Any, Any] | None = None  # drops it; None for one that another program took
    _is_dropped = False  # another may have its name since

    def __init__(self, envs: SnapshotVectorEnv, row: dict[str, Any]) -> None:
        """Describe the snapshot by this row of the hub's table."""
        self.name, self.env_ids = str(row["name"]), tuple(map(int, row["rows"]))
        self.steps, self.episode_ids = tuple(map(int, row["steps"])), tuple(map(int, row["episodes"]))
        self.ended = tuple(map(bool, row["ended"]))
        self.nbytes, self.depth, self.problems = int(row["nbytes"]), int(row["depth"]), tuple(map(str, row["problems"]))
        self._envs = weakref.ref(envs)

    def _own(self, envs: SnapshotVectorEnv) -> Snapshot:
        """Have the snapshot dropped with this."""
        self._finalizer = weakref.finalize(self, envs._unreferenced.append, self.name)
        self._finalizer.atexit = False
        if (former := envs._owned.get(self.name)) is not None and former._finalizer is not None:  # too old, or lost
            former._is_dropped = bool(former._finalizer.detach())
        envs._owned[self.name] = self
        return self

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        envs = self._envs()
        if error is None and envs is not None and not envs.closed:
            envs.drop(self)
        else:  # the error may have left a request pending; the next one drops it
            self._detach()

    def _detach(self) -> None:
        """Have the next request drop it."""
        if self._finalizer is not None:
            self._finalizer()
        self._is_dropped = True

    def __repr__(self) -> str:
        return f"<Snapshot {self.name!r} of envs {list(self.env_ids)} at steps {list(self.steps)}>"


class SnapshotVectorEnv(VectorEnv[Any, Any, np.ndarray]):
    """The part of a ``HubVectorEnv`` that takes snapshots, through its session."""

    _session: VectorSession
    _last_reset: Reset
    restored_from: Mapping[int, tuple[Snapshot, int]] = MappingProxyType({})  # by env, in the last restore; its source
    _observers: tuple[Any, ...]
    _unreferenced: list[str]  # names of snapshots that nothing refers to any more; the next request drops them
    _owned: weakref.WeakValueDictionary[str, Snapshot]  # by name, those that this program took
    _break_off: Callable[[BaseException], None]
    _forget: Callable[[BaseException], None]
    reset_wait: Callable[[], tuple[Any, dict[Any, Any]]]

    @exclusive
    def snapshot(self, env_ids: EnvIds = None, name: str | None = None) -> Snapshot:
        """Take a snapshot of these envs, or of all, between two steps: a copy of each env's process, which waits.

        It has all that the env has: wrappers, generators, time limits, and what is in C and C++. It takes some
        milliseconds. The envs must have been made with ``snapshots=True``.

        Args:
            env_ids: different numbers of envs.
            name: its name among those of the session, at most 64 characters; by default one that no other has.

        Raises:
            SnapshotRefused: an env has what a copy would lack or share, such as a thread, a socket or a file that it
                writes; the text names it.
            SnapshotLimit: there are as many snapshots as there may be, and no earlier one from which the same actions
                lead here; drop some.
            RequestRefused: there is one of this name.
            SessionBusy: a request is pending, or envs are under way.
        """
        self._session.check_free("snapshot")
        if not isinstance(name, (str, type(None))):
            raise TypeError(f"name must be a text or None, got {brief(name)}")
        name = name or f"snapshot-{secrets.token_hex(4)}"
        rows = sorted(checked_env_ids(env_ids, self.num_envs).tolist())
        try:
            (taken,) = self._ask("take", name, rows)
        except BaseException as error:
            if not isinstance(error, Exception) and name not in self._owned:  # an interrupt: the hub goes on
                self._unreferenced.append(name)
            raise
        snapshot = taken._own(self)
        for observer in self._observers:
            observer.snapshot_taken(snapshot)
        return snapshot

    @exclusive
    def restore(
        self,
        snapshot: Snapshot | str,
        env_ids: EnvIds = None,
        source: int | Sequence[int] | None = None,
        reseed: int | Sequence[int] | None = None,
    ) -> tuple[Any, dict[Any, Any]]:
        """Have envs go on from a snapshot; it can be used again. All of them are ready before the first one changes.

        Args:
            snapshot: a snapshot of these envs, or its name.
            env_ids: different numbers of envs; by default those of the snapshot.
            source: the env of the snapshot whose state these envs get, or one for each of them; by default their own.
            reseed: a seed for the generators of the envs and their processes, so that branches differ: one int (env
                ``env_ids[i]`` gets ``reseed + i``), or one for each. Generators in C++, as ALE's, go on as they are.

        Returns:
            Observations and infos as of a masked reset: of the restored envs what they showed when the snapshot was
            taken, of the others their last observation and no info.

        Raises:
            SnapshotLost: the snapshot was dropped, its process has ended, or its actions led to another result when
                they were made again; the envs are as they were.
            SnapshotRefused: it is of other envs, or has no such source.
            SessionBusy: a request is pending, or envs are under way.
        """
        session = self._session
        session.check_free("restore")
        snapshot = self._checked(snapshot)
        rows = [*snapshot.env_ids] if env_ids is None else checked_env_ids(env_ids, self.num_envs).tolist()
        sources = rows if source is None else _each("source", source, len(rows))
        seeds: list[int | None] = [None] * self.num_envs
        if reseed is not None:
            given = _each("reseed", reseed, len(rows), 1)
            if min(given, default=0) < 0:
                raise ValueError(f"reseed must be seeds, which are not negative, got {brief(reseed)}")
            for row, seed in zip(rows, given, strict=True):
                seeds[row] = seed
        pairs = sorted(zip(rows, sources, strict=True))
        try:
            self._ask("restore", snapshot.name, [row for row, _ in pairs], [row for _, row in pairs])
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: the hub goes on; else no env has changed
                self._break_off(error)
            raise
        described = copy(snapshot)  # which does not keep the snapshot
        self.restored_from = {row: (described, source) for row, source in pairs}
        mask = np.zeros(self.num_envs, bool)
        mask[rows] = True
        self._last_reset = Reset(seeds, mask.tolist(), snapshot=snapshot.name)
        try:
            session.begin_reset(self._last_reset)
            return self.reset_wait()
        except BaseException as error:
            self._forget(error)
            raise

    @exclusive
    def drop(self, snapshot: Snapshot | str) -> None:
        """Forget a snapshot, and free its memory; nothing is done for one that there is not."""
        self._session.check_free("drop")
        if isinstance(snapshot, Snapshot) and snapshot._is_dropped:
            return
        name = snapshot if isinstance(snapshot, str) else self._checked(snapshot).name
        if (owned := self._owned.pop(name, None)) is not None:
            owned._detach()
        else:
            self._unreferenced.append(name)
        self._ask("list")

    @exclusive
    def snapshots(self) -> list[Snapshot]:
        """The snapshots of the session, the oldest first, also those that another program took before it detached."""
        self._session.check_free("snapshots")
        return self._ask("list")

    @property
    def snapshots_allowed(self) -> dict[int, str]:
        """The reason why no snapshot can be taken of each env as it is now, empty where one can: one is taken."""
        why = {}
        for env_id in range(self.num_envs):
            try:
                self.drop(self.snapshot([env_id]))
                why[env_id] = ""
            except SnapshotRefused as error:
                why[env_id] = str(error)
        return why

    def _checked(self, snapshot: Snapshot | str) -> Snapshot:
        if isinstance(snapshot, str):
            listed = [each for each in self._ask("list") if each.name == snapshot]
            if not listed:
                raise SnapshotLost(f"this session has no snapshot {snapshot!r}: it was dropped, or lost with its hub")
            return listed[0]
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"snapshot must be a Snapshot or the name of one, got {brief(snapshot)}")
        if snapshot._envs() is not self:
            raise SnapshotRefused(f"{snapshot!r} is of another vector env: an env goes on in the session that it is of")
        if snapshot._is_dropped:
            raise SnapshotLost(f"{snapshot!r} was dropped")
        return snapshot

    def _ask(
        self, action: str, name: str = "", rows: Sequence[int] = (), sources: Sequence[int] = ()
    ) -> list[Snapshot]:
        dropped = [*self._unreferenced]
        wanted = messages.SnapshotRequest(action, name, [*rows], [*sources], dropped)
        try:
            table = self._session.snapshot(wanted)
            del self._unreferenced[: len(dropped)]
            return [Snapshot(self, row) for row in table]
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the hub describes no snapshot: {error!r}") from error


def _each(name: str, given: int | Sequence[int], count: int, step: int = 0) -> list[int]:
    """The numbers that are given, or as many from a single one on, which differ by ``step``."""
    if not isinstance(given, (Sequence, np.ndarray)):
        first = operator.index(given)
        return [first + step * number for number in range(count)]
    values = [*map(operator.index, given)]
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} envs")
    return values
