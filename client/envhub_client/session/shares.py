"""Parts of a vector env's batch: a worker steps its share of the envs in one call, once all of them are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from envhub.arena.layout import whole_shares


class _Sent(NamedTuple):
    """The action of one env, by a code per leaf and an array of one row per leaf."""

    codes: bytes
    arrays: Sequence[np.ndarray]


Begin = Callable[[np.ndarray, bytes, Sequence[np.ndarray]], None]


class RowShares(Protocol):
    """Holder of the actions of envs until those of the others of their share are sent.

    Attributes:
        held: the envs that were sent and wait for others, ascending.
    """

    held: list[int]

    @property
    def missing(self) -> list[int]:
        """The envs that these wait for, ascending."""

    def give_up(self) -> None:
        """Forget what is held."""

    def send(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray], begin: Begin) -> None:
        """Have ``begin`` step the shares that are complete with these envs, and hold the actions of the others.

        Raises:
            ValueError: an env is held already, or the actions of a share have several dtypes; nothing has changed.
            Exception: from ``begin``; nothing has changed.
        """


class Shares:
    """Holds the actions of envs until those of the others of their share are sent.

    Attributes:
        held: the envs that were sent and wait for others, ascending; a plain attribute, because every step looks at it.
    """

    def __init__(self, num_envs: int, workers: int) -> None:
        """Make a table of ``workers``, each of which has the envs of one remainder."""
        self._num_envs, self._workers = num_envs, workers
        self._hold({})

    def _hold(self, actions: dict[int, _Sent]) -> None:
        self._actions, self.held = actions, sorted(actions)

    @property
    def missing(self) -> list[int]:
        """The envs that these wait for, ascending."""
        shares = {env_id % self._workers for env_id in self.held}
        return [row for row in range(self._num_envs) if row % self._workers in shares and row not in self._actions]

    def give_up(self) -> None:
        """Forget what is held."""
        self._hold({})

    def send(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray], begin: Begin) -> None:
        """Have ``begin`` step the complete shares, and hold the others; as ``RowShares.send``."""
        if not self.held and whole_shares(env_ids.tolist(), self._num_envs, self._workers):
            begin(env_ids, codes, arrays)
            return
        if again := [row for row in env_ids.tolist() if row in self._actions]:
            raise ValueError(f"envs {again} are sent already, and wait for envs {self.missing} of their share")
        before = self._actions
        sent = {row: _Sent(codes, [a[n : n + 1].copy() for a in arrays]) for n, row in enumerate(env_ids.tolist())}
        sent = {**before, **sent}
        shares = [range(first, self._num_envs, self._workers) for first in {*(env_ids % self._workers).tolist()}]
        whole = sorted(row for share in shares if all(row in sent for row in share) for row in share)
        if len({sent[row].codes for row in whole}) > 1:
            raise ValueError("a vector env takes the actions of all its envs as arrays of one dtype; no env has moved")
        self._hold({row: sent[row] for row in sent.keys() - whole})
        if not whole:
            return
        try:
            joined = [np.concatenate(parts) for parts in zip(*(sent[row].arrays for row in whole), strict=True)]
            begin(np.array(whole), sent[whole[0]].codes, joined)
        except Exception:  # after an interrupt they may be under way
            self._hold(before)
            raise
