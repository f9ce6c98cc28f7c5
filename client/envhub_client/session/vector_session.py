"""The seam between a vector env and where its envs are, and what sessions on one hub and on several have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from gymnasium.vector.async_vector_env import AsyncState

from envhub.arena.layout import whole_shares
from envhub.env_failure import reseeded
from envhub.errors import EnvHubError, EnvRaised
from envhub.protocol.client import Reply
from envhub.protocol.messages import Call, Reset, SetAttr, unpack_rows
from envhub.protocol.prelude import Frame
from envhub.vector_errors import NothingPending, SessionBusy
from envhub_client.connection.connection import Connection
from envhub_client.deadline import Deadline
from envhub_client.lanes.base import Lane
from envhub_client.session.description import SessionDescription, Sizing, ValueCodec
from envhub_client.session.options import SessionOptions
from envhub_client.session.pending import InUse, PendingRequest

log = logging.getLogger("envhub")


class SeedsGiven:
    """The last seed that the program gave each env, from which follow those of envs whose session was lost.

    It is the rule for an env whose worker has ended.
    """

    def __init__(self) -> None:
        self._seeds: dict[int, int] = {}
        self._losses = Counter[int]()

    def remember(self, reset: Reset) -> None:
        seeds = {row: seed for row, seed in enumerate(reset.seeds) if seed is not None}
        self._seeds.update({row: seed for row, seed in seeds.items() if not reset.mask or reset.mask[row]})

    def lose(self, rows: Iterable[int]) -> None:
        self._losses.update(rows)

    def first_seeds(self, rows: Iterable[int]) -> list[int | None]:
        """The seeds of the first resets of these envs, once they are made again."""
        return [reseeded(self._seeds.get(row), 0, self._losses[row]) for row in rows]


class Ending(Protocol):
    """The part of a session that ends it."""

    closed: bool  # its end has begun, even where an interrupt broke off ``close``


class _Sent(NamedTuple):
    """The action of one env, by a code per leaf and an array of one row per leaf."""

    codes: bytes
    arrays: Sequence[np.ndarray]


Begin = Callable[[np.ndarray, bytes, Sequence[np.ndarray]], None]


class RowShares(Protocol):
    """Holder of the actions of envs until those of the others of their share are sent."""

    held: list[int]  # the envs that were sent and wait for others, ascending; every step looks at it

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
    """Holds the actions of envs until those of the others of their share are sent."""

    def __init__(self, num_envs: int, workers: int) -> None:
        """Make a table of ``workers``, each of which has the envs of one remainder."""
        self._num_envs, self._workers = num_envs, workers
        self._hold({})

    def _hold(self, actions: dict[int, _Sent]) -> None:
        self._actions, self.held = actions, sorted(actions)

    @property
    def missing(self) -> list[int]:
        shares = {env_id % self._workers for env_id in self.held}
        return [row for row in range(self._num_envs) if row % self._workers in shares and row not in self._actions]

    def give_up(self) -> None:
        self._hold({})

    def send(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray], begin: Begin) -> None:
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


class VectorSession(ABC):
    """Everything that a ``HubVectorEnv`` needs of its envs, wherever these are.

    One request is pending at a time. Resets and steps go by the ``lane``, begun and waited for through ``pending``;
    calls by the methods here. Its users hold ``in_use`` from their first look at it until they have acted on that.
    Every method but ``close`` may raise ``HubLost`` and any other ``EnvHubError`` of the session.
    """

    description: SessionDescription
    options: SessionOptions
    values: ValueCodec
    in_use: InUse
    lane: Lane  # the same object for the session's whole life
    pending: PendingRequest  # says too whether the session is over
    _shares: RowShares
    _ending: Ending
    _seeds: SeedsGiven

    @property
    @abstractmethod
    def address(self) -> str | None:
        """The hub's address or name, as it was given but without its keys; None for a private hub, or without one."""

    @property
    @abstractmethod
    def token(self) -> str:
        """The key to this session, with which another process takes it over or observes it."""

    @property
    @abstractmethod
    def sizing(self) -> Sizing:
        """Number of processes that host the envs now, and the reason."""

    @property
    @abstractmethod
    def compression(self) -> str:
        """Compression of observations on the wire lane; empty for none."""

    @abstractmethod
    def hub_of(self, env: int) -> str | None:
        """The name of the hub that has this env now; None for a private hub, without one, or where it is not known."""

    @abstractmethod
    def call(self, call: Call) -> dict[int, Frame]:
        """Make a call of its rows, or of all rows if it names none, and wait for it."""

    @abstractmethod
    def begin_call(self, call: Call) -> None: ...

    @abstractmethod
    def wait_call(self, call: Call, timeout: float | None) -> dict[int, Frame]:
        """The results of this call, which was begun; as ``call``, and with errors as for ``PendingRequest.wait``."""

    @abstractmethod
    def set_attr(self, message: SetAttr) -> None: ...

    @abstractmethod
    def observe(self) -> Reply:
        """Last observations of the envs, as in a hub's reply to OBSERVE."""

    @abstractmethod
    def detach(self) -> None:
        """Leave the session as it is, for another process to take it over; this object is closed then."""

    @abstractmethod
    def close(self, terminate: bool, finish: Callable[[], object], deadline: Deadline | None = None) -> None:
        """End the session: have the envs closed, or with ``terminate`` kill their processes. May be called again.

        ``finish`` waits for the pending request, if there is one. At the deadline, and at an interrupt, the processes
        whose envs are not closed are killed.
        """

    def check_free(self, what: str, among_others: bool = False, resets_all: bool = False) -> None:
        """Check that ``what`` may be begun; with ``among_others`` also while some envs are outstanding.

        ``resets_all``: it is a reset of all envs, which may be begun while some wait for others of their share.
        """
        pending = self.pending
        if pending.closed or self._ending.closed:
            raise pending.closed_error()
        if pending.state is not AsyncState.DEFAULT:
            raise pending.busy_error(what)
        if self._shares.held and not among_others and not resets_all:
            text = f"while envs {self._shares.held} wait for envs {self._shares.missing} of their share to be sent."
            raise SessionBusy(f"Calling `{what}` {text}", "send")
        if pending.returned is not None:
            self.lane.taken(pending.returned)
            pending.returned = None
        if self.lane.settle() and not among_others:
            raise SessionBusy(f"Calling `{what}` while envs are under way that `recv` has not returned.", "recv")

    def begin_reset(self, reset: Reset, resets_all: bool) -> None:
        """Begin a reset; one of all envs gives up those that wait for others of their share."""
        if resets_all:
            self._shares.give_up()
        self._seeds.remember(reset)
        self.pending.begin(AsyncState.WAITING_RESET, self.lane.begin_reset, reset)

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these envs; those of a vector env wait for the others of their share."""
        if not self.description.vector:
            self.lane.begin_rows(env_ids, codes, arrays)
            return
        outstanding = self.lane.are_outstanding[env_ids]
        if outstanding.any():
            raise ValueError(f"envs {env_ids[outstanding].tolist()} are under way; receive them first")
        self._shares.send(env_ids, codes, arrays, self.lane.begin_rows)

    def check_received(self) -> None:
        """Check that some env is under way."""
        if self.lane.outstanding:
            return
        why = "without any prior call to `send` or `async_reset`."
        if held := self._shares.held:
            why = f"while envs {held} of a vector env wait for envs {self._shares.missing} of their share to be sent."
        raise NothingPending(f"Calling `recv` {why}", "recv")

    def _end_once_finished(self, finish: Callable[[], object], end: Callable[[], None]) -> None:
        """End the session by ``end``, once ``finish`` has waited for the pending request, if there is one."""
        try:
            if self.pending.state is not AsyncState.DEFAULT:
                finish()
        except EnvRaised:
            raise
        except EnvHubError as error:
            log.debug("closing a vector env: %s", error)
        finally:
            end()
            self.pending.closed = True


def results_of(call: Call, reply: Reply, num_envs: int, connection: Connection) -> dict[int, Frame]:
    """The encoded result of each row of the call, or of all ``num_envs`` if it names none, in the reply."""
    wanted = call.rows or range(num_envs)
    try:
        if len(reply.frames) == 1:
            results: Sequence[tuple[int, Frame]] = unpack_rows(reply.frames[0], num_envs)
        else:
            results = [*zip(wanted, reply.frames, strict=True)]
        if [row for row, _ in results] != [*wanted]:
            raise ValueError(f"results of envs {[row for row, _ in results]}")
    except ValueError as error:
        raise connection.breach(f"a reply to CALL does not fit the session: {error}") from error
    return dict(results)
