"""The part of a session that says what may be begun on its lane, on one hub or on several."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from gymnasium.vector.async_vector_env import AsyncState

from envhub.env_failure import reseeded
from envhub.errors import EnvHubError, EnvRaised
from envhub.protocol.messages import Reset
from envhub.vector_errors import NothingPending, SessionBusy
from envhub_client.lanes.base import Lane
from envhub_client.session.description import SessionDescription
from envhub_client.session.pending import PendingRequest
from envhub_client.session.shares import RowShares

log = logging.getLogger("envhub")


class SeedsGiven:
    """The last seed that the program gave each env, from which follow those of envs whose session was lost.

    It is the rule for an env whose worker has ended.
    """

    def __init__(self) -> None:
        self._seeds: dict[int, int] = {}
        self._losses = Counter[int]()

    def remember(self, reset: Reset) -> None:
        """Note the seeds of a reset."""
        seeds = {row: seed for row, seed in enumerate(reset.seeds) if seed is not None}
        self._seeds.update({row: seed for row, seed in seeds.items() if not reset.mask or reset.mask[row]})

    def lose(self, rows: Iterable[int]) -> None:
        """Note that the session of these envs was lost."""
        self._losses.update(rows)

    def first_seeds(self, rows: Iterable[int]) -> list[int | None]:
        """The seeds of the first resets of these envs, once they are made again."""
        return [reseeded(self._seeds.get(row), 0, self._losses[row]) for row in rows]


class Ending(Protocol):
    """The part of a session that ends it.

    Attributes:
        closed: whether the end has begun, even where an interrupt broke off ``close``.
    """

    closed: bool


class LaneSession:
    """Begins resets and steps on the lane of a ``VectorSession``, whose attributes it has."""

    lane: Lane
    pending: PendingRequest
    description: SessionDescription
    _shares: RowShares
    _ending: Ending
    _seeds: SeedsGiven

    def check_free(self, what: str, among_others: bool = False, resets_all: bool = False) -> None:
        """Check that ``what`` may be begun; as ``VectorSession.check_free``."""
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
        """Begin a step of these envs; as ``VectorSession.begin_rows``."""
        if not self.description.vector:
            self.lane.begin_rows(env_ids, codes, arrays)
            return
        outstanding = self.lane.are_outstanding[env_ids]
        if outstanding.any():
            raise ValueError(f"envs {env_ids[outstanding].tolist()} are under way; receive them first")
        self._shares.send(env_ids, codes, arrays, self.lane.begin_rows)

    def check_received(self) -> None:
        """Check that some env is under way; as ``VectorSession.check_received``."""
        if self.lane.outstanding:
            return
        why = "without any prior call to `send` or `async_reset`."
        if held := self._shares.held:
            why = f"while envs {held} of a vector env wait for envs {self._shares.missing} of their share to be sent."
        raise NothingPending(f"Calling `recv` {why}", "recv")

    def _end_once_finished(self, finish: Callable[[], object], end: Callable[[], None]) -> None:
        """End the session by ``end``, once ``finish`` has waited for the pending request, if there is one.

        Raises:
            EnvRaised: as an env raised it in the pending request; the session has ended.
        """
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
