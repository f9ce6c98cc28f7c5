"""Sessions: what may be begun in any of them, and one on one hub, its calls and its end."""

from __future__ import annotations

import contextlib
import logging
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector.async_vector_env import AsyncState

from envhub import errors
from envhub.env_failure import reseeded
from envhub.protocol.client import Reply
from envhub.protocol.messages import Attach, Call, Make, Observe, Op, Reset, SetAttr, SnapshotRequest
from envhub.secret import Secret
from envhub.transport.address import written
from envhub.vector_errors import SessionBusy
from envhub_client.connection.connection import CONNECT_TIMEOUT_S, Connection
from envhub_client.deadline import Deadline
from envhub_client.frames import hide_frames
from envhub_client.lanes.base import Decode, HubLane, Lane
from envhub_client.session.description import SessionDescription, Sizing, ValueCodec
from envhub_client.session.maker import SessionMaker
from envhub_client.session.options import SessionOptions
from envhub_client.session.pending import InUse, PendingRequest

log = logging.getLogger("envhub")


class SeedsGiven:
    """The last seed that the program gave each env, from which follow those of envs whose session was lost."""

    def __init__(self) -> None:
        self._seeds: dict[int, int] = {}
        self._losses = Counter[int]()

    def remember(self, reset: Reset) -> None:
        seeds = {row: seed for row, seed in enumerate(reset.seeds) if seed is not None}
        self._seeds.update({row: seed for row, seed in seeds.items() if not reset.mask or reset.mask[row]})

    def lose(self, rows: Iterable[int]) -> None:
        self._losses.update(rows)

    def first_seeds(self, rows: Iterable[int]) -> list[int | None]:
        """The seeds of the first resets of these envs, once they are made again: as after the end of a worker."""
        return [reseeded(self._seeds.get(row), 0, self._losses[row]) for row in rows]


class VectorSession(ABC):
    """Everything that a ``HubVectorEnv`` needs of its envs, wherever these are.

    One request is pending at a time. Resets and steps go by the ``lane``, begun and waited for through ``pending``;
    calls by the methods here. Its users hold ``in_use`` from their first look at it until they have acted on that.
    """

    description: SessionDescription
    options: SessionOptions
    values: ValueCodec
    in_use: InUse
    lane: Lane  # the same object for the session's whole life
    pending: PendingRequest  # says too whether the session is over
    _worker_rows: Sequence[range]  # of each worker
    _closable: Any  # ends all; is ``closed`` once that has begun, even where an interrupt broke off ``close``
    _seeds: SeedsGiven

    @property
    @abstractmethod
    def address(self) -> str | None:
        """The hub's address or name, as it was given but without its keys; None for a private hub."""

    @property
    @abstractmethod
    def token(self) -> str: ...

    @property
    @abstractmethod
    def sizing(self) -> Sizing: ...

    @property
    @abstractmethod
    def compression(self) -> str: ...

    @abstractmethod
    def hub_of(self, env: int) -> str | None:
        """The name of the hub that has this env now; None for a private hub, or where it is not known."""

    @abstractmethod
    def begin_call(self, call: Call) -> None:
        """Begin a call of its rows, or of all rows if it names none."""

    @abstractmethod
    def wait_call(self, call: Call, timeout: float | None, decode: Decode) -> dict[int, Any]:
        """The decoded results of this call, which was begun; errors as for ``PendingRequest.wait``."""

    @abstractmethod
    def set_attr(self, message: SetAttr) -> None: ...

    @abstractmethod
    def snapshot(self, wanted: SnapshotRequest) -> list[dict[str, Any]]:
        """Take, drop or list snapshots, or have rows restored, which a reset by the snapshot's name then shows."""

    @abstractmethod
    def observe(self) -> Reply:
        """Last observations of the envs, as in a hub's reply to OBSERVE."""

    @abstractmethod
    def detach(self) -> None:
        """Leave the session as it is, for another process to take it over; this object is closed then."""

    @abstractmethod
    def close(self, terminate: bool, finish: Callable[[], object], deadline: Deadline | None = None) -> None:
        """Have the envs closed, or with ``terminate``, at the deadline or at an interrupt their processes killed.

        ``finish`` waits for the pending request, if there is one. May be called again.
        """

    def check_free(self, what: str, among_others: bool = False) -> None:
        """Check that ``what`` may be begun; with ``among_others`` also while some envs are outstanding."""
        pending = self.pending
        if pending.closed or self._closable.closed:
            raise pending.closed_error()
        if pending.state is not AsyncState.DEFAULT:
            raise pending.busy_error(what)
        if pending.returned is not None:
            self.lane.taken(pending.returned)
            pending.returned = None
        if self.lane.settle() and not among_others:
            raise SessionBusy(f"Calling `{what}` while envs are under way that `recv` has not returned.", "recv")

    def begin_reset(self, reset: Reset) -> None:
        self._seeds.remember(reset)
        self.pending.begin(AsyncState.WAITING_RESET, self.lane.begin_reset, reset)

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these envs; ``ValueError`` for some of a vector env's worker without the others."""
        if self.description.vector:
            sent = set(env_ids.tolist())
            if torn := [[*rows] for rows in self._worker_rows if 0 < len(sent.intersection(rows)) < len(rows)]:
                text = "a vector env steps all envs of a worker in one call: send all or none of"
                raise ValueError(f"{text} {' and '.join(errors.brief(rows, 300) for rows in torn)}; no env has moved")
        self.lane.begin_rows(env_ids, codes, arrays)

    def _end_once_finished(self, finish: Callable[[], object], terminate: bool, deadline: Deadline | None) -> None:
        try:
            if self.pending.state is not AsyncState.DEFAULT and not self.pending.interrupted:
                finish()
        except errors.EnvRaised:
            raise
        except errors.EnvHubError as error:
            log.debug("closing a vector env: %s", error)
        finally:
            self._closable.end_all(terminate, deadline)
            self.pending.closed = True

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing() or not hasattr(self, "_closable"):
            return
        if not hasattr(self, "pending"):  # its making was interrupted, and so was the end of that
            self._closable.end_all()
        elif not self.pending.closed:
            with contextlib.suppress(errors.Forked):  # it is the parent's
                self.close(terminate=False, finish=lambda: None)


class Session(VectorSession):
    """A ``VectorSession`` on one hub."""

    lane: HubLane

    def __init__(
        self,
        class_name: str,
        address: str | Secret[str] | None,
        make: Make | Attach,
        options: SessionOptions,
        timeout: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Make a session, or take one over, for an object of this class; without an address on the private hub.

        The connection may take ``timeout`` seconds, by default 10; building the envs is not timed.

        Raises:
            HubUnreachable: no hub answered, or this system is not Linux.
            RequestRefused: the hub does not make this.
            RuntimeError, UnsupportedSpace: the envs' spaces differ, or have no form on the network.
            Exception: what an env's constructor raised, as its own class or as ``EnvRaised``.
        """
        self.in_use = InUse()
        self._maker = self._closable = SessionMaker(address, make, options)
        self.options, self.values = self._maker.options, self._maker.values
        self._seeds = SeedsGiven()
        try:
            self.lane = self._maker.make(timeout)
            self.description = self._maker.description
            workers = self.sizing.num_workers
            self._worker_rows = [range(n, self.description.num_envs, workers) for n in range(workers)]
            self.pending = PendingRequest(class_name, self.connection.give_up)
        except BaseException as error:  # an interrupt, too, must not leave the hub with envs that are not used
            self._maker.end_all()
            hide_frames(error)
            raise

    @property
    def connection(self) -> Connection:
        return self._maker.connection

    @property
    def address(self) -> str | None:
        return None if self._maker.hub is None else written(self._maker.hub)

    @property
    def token(self) -> str:
        return self.connection.protocol.token.hex()

    @property
    def sizing(self) -> Sizing:
        return self._maker.sizing

    @property
    def compression(self) -> str:
        return self._maker.compression

    def hub_of(self, env: int) -> str | None:
        return self.connection.hub

    def begin_call(self, call: Call) -> None:
        self.pending.begin(AsyncState.WAITING_CALL, self.lane.begin_call, call)

    def wait_call(self, call: Call, timeout: float | None, decode: Decode) -> dict[int, Any]:
        return self.pending.wait(AsyncState.WAITING_CALL, self.lane.wait_call, timeout, decode)

    def set_attr(self, message: SetAttr) -> None:
        try:  # around all of it: an interrupt must not leave it pending
            self.lane.begin_call(message)
            self.lane.wait_call(None, lambda blob: None)
        except BaseException:
            self.connection.give_up()
            raise

    def snapshot(self, wanted: SnapshotRequest) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.connection.ask(Op.SNAPSHOT, wanted).message.rows
        return rows

    def observe(self) -> Reply:
        return self.connection.ask(Op.OBSERVE, Observe(self.connection.protocol.token, described=True))

    def detach(self) -> None:
        self.check_free("detach")
        detach(self._maker)
        self.pending.closed = True

    def close(self, terminate: bool, finish: Callable[[], object], deadline: Deadline | None = None) -> None:
        with self.in_use:
            try:
                self.connection.in_use.check()
            except errors.LocalProtocolError:  # it is the parent's, or an earlier attempt was interrupted near its end
                self.connection.close()
                return
            with self.connection.in_use:
                self._end_once_finished(finish, terminate, deadline)


def detach(maker: SessionMaker) -> None:
    if maker.hub is None:
        raise errors.RequestRefused(
            "the envs of a private hub end with its program; make them on a hub of its own to leave them to another"
        )
    maker.connection.check()
    maker.connection.close()
