"""A lane that outlives its session: when that ends, the envs go on in a new one, and every episode is truncated.

The new session is given the reason. Its workers answer the first step of every env that was not reset before with that
truncation, as they do for an env that was made again after its worker died. A request that finds its session over is
therefore begun again in the new session, and this module holds nothing about episodes. A new session cannot know what
its envs showed last in the old one: this module puts it in, until an env has shown something in the new session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from envhub.errors import AccessDenied, EnvHubError, HubTimeout, RemoteProtocolError, of_hub
from envhub.protocol.messages import Reset
from envhub_client.batch import Batch, invalid_rows, with_earlier
from envhub_client.connection.failures import SESSION_ENDS
from envhub_client.deadline import Deadline
from envhub_client.lanes.base import HubLane, Lane
from envhub_client.session.absence import Absence

ATTEMPTS_MAX = 3  # of one request, each in another session
# The only hub that there is does not let this client in: there is no other session.
RENEWED = tuple(kind for kind in SESSION_ENDS if kind is not AccessDenied)

Begin = Callable[[HubLane], None]


class LaneSource(Protocol):
    """Source of a lane when the session of another is over."""

    def make_again(self, loss: EnvHubError) -> Absence[HubLane]:
        """Have the envs made again, each with a truncation by this loss pending; the absence has their lane.

        Raises:
            EnvHubError: the loss, where the envs are being closed.
        """


class RecoveringLane:
    """A lane, and after the loss of its hub another one; otherwise as any lane."""

    def __init__(self, lane: HubLane, source: LaneSource) -> None:
        """Begin with ``lane``; after a loss ``source`` has the next one."""
        self.num_envs, self.leaves = lane.num_envs, lane.leaves
        self._lane = lane
        self._source = source
        self._last = [np.zeros((lane.num_envs, *leaf.shape), leaf.dtype) for leaf in lane.leaves]
        self._unseen = np.zeros(lane.num_envs, bool)  # whether the env has shown nothing in this session yet
        self._mask: np.ndarray | None = None  # which rows the reset under way resets
        self._under_way = np.zeros(lane.num_envs, bool)  # by ``begin_rows``
        self._again: Begin | None = None  # begins on another lane what is under way
        self._loss: EnvHubError | None = None  # while it is set, nothing is under way on ``_lane``
        self._last_loss: EnvHubError | None = None  # after which this session was made
        self._absence: Absence[HubLane] | None = None  # the making of another, once it has begun
        self._tried: tuple[int, ...] | None = None  # progress of ``_lane``, a new one, before ``_again`` is begun there
        self._untold = np.zeros(lane.num_envs, bool)  # whether the truncation by it has not reached the caller yet
        self._stepping = False  # whether a step of all envs is under way, or was the last request
        self._returned = False  # whether its results were returned
        self._breaches = 0  # of the protocol, in results of what is under way

    @property
    def name(self) -> str:
        """Lane by which the envs are stepped now."""
        return self._lane.name

    def lose(self, loss: EnvHubError) -> None:
        """Have another session made, since a request other than a step or reset has found this one to be over.

        Raises:
            EnvHubError: the loss, where the envs are being closed.
        """
        self._loss, self._again = loss, None
        self._make_again(loss).wait(0)

    def breach(self, row: int, what: str) -> None:
        """Go on in another session at the next wait, since what the hub sent breaks the protocol."""
        try:
            self._lane.breach(row, what)
        except RemoteProtocolError as error:
            self._loss = error
            self._breaches += 1
            if self._breaches == ATTEMPTS_MAX:
                raise

    def _make_again(self, loss: EnvHubError) -> Absence[HubLane]:
        if self._absence is None:
            self._keep_last()
            self._absence = self._source.make_again(loss)
        return self._absence

    @property
    def is_lost(self) -> bool:
        """True if the session is over, so that ``recover`` has to wait for another."""
        return self._loss is not None

    def recover(self, timeout: float | None) -> None:
        """Go on in another session if this one is over, and begin there what is under way.

        Raises:
            HubTimeout: there is none within ``timeout`` seconds; its making goes on.
            EnvHubError: there is none.
        """
        if (loss := self._loss) is None:
            return
        absence, deadline = self._make_again(loss), None if timeout is None else Deadline(timeout)
        if not absence.wait(timeout):
            raise of_hub(HubTimeout(f"{loss}; its envs are not made again yet: wait again"), loss.hub) from loss
        self._lane = lane = absence.parts()[0]
        self._untold[:] = True
        try:
            if self._again is not None:
                # What an interrupt or a timeout has left to be confirmed, so that it is known what was begun.
                lane.confirm_rows(None if deadline is None else deadline.left_s())
                if self._tried is None:
                    self._tried = lane.progress
                if lane.progress == self._tried:
                    self._again(lane)
                lane.confirm_rows(None if deadline is None else deadline.left_s())
            self._last_loss, self._loss, self._absence, self._tried = loss, None, None, None
        except RENEWED as error:
            self._loss, self._absence, self._tried = error, None, None

    def _keep_last(self) -> None:
        """Keep what the envs showed in this session, before its lane is replaced; interrupted, it is done again."""
        seen = ~self._unseen
        for last, leaf in zip(self._last, self._lane.last_observations(), strict=True):
            last[seen] = leaf[seen]
        self._unseen[:] = True

    def give_up(self) -> None:
        """Give up what was begun; a loss that its result tells is told by the next step.

        That is in another session, for this one tells it once.
        """
        if self._tried is not None:  # it may have begun in this session, before an interrupt
            self._last_loss, self._loss, self._absence, self._tried = self._loss, None, None, None
        self._lane.give_up()
        self._again = None
        if self._loss is None and self._stepping and self._untold.any():
            self._loss = self._last_loss
        self._stepping = self._returned = False

    def settle(self) -> bool:
        """Wait for the end of a step that was begun and given up; returns whether some envs are outstanding."""
        if self._returned:  # this comes before the next request: the caller has what was returned
            self._returned, self._stepping, self._untold[:] = False, False, False
        try:
            if self._loss is None:
                self._lane.settle()
        except RENEWED as error:
            self._loss = error
        return bool(self._under_way.any())

    def _begin(self, begin: Begin, again: Begin | None = None) -> None:
        """Begin this now, or if the hub is lost, when it is waited for: this, or ``again`` if given."""
        self._again, self._breaches = again or begin, 0
        try:
            if self._loss is None:
                begin(self._lane)
        except RENEWED as error:
            self._loss = error

    def _wait(self, wait: Callable[[Lane, float | None], Batch], timeout: float | None) -> Batch:
        """The results of what is under way, if need be in another session.

        Raises:
            EnvHubError: there is no other session.
        """
        deadline = None if timeout is None else Deadline(timeout)
        for _ in range(ATTEMPTS_MAX):
            self.recover(None if deadline is None else deadline.left_s())
            try:
                if self._loss is None:
                    return wait(self._lane, None if deadline is None else deadline.left_s())
            except RENEWED as error:
                self._loss = error
        assert self._loss is not None
        raise self._loss

    # --- the whole batch --------------------------------------------------------------------------------------------

    def begin_reset(self, reset: Reset) -> None:
        """Begin a reset."""
        self._stepping = False
        self._mask = np.array(reset.mask or [True] * self.num_envs)
        self._begin(lambda lane: lane.begin_reset(reset))

    def begin_step(self, codes: bytes, arrays: Sequence[np.ndarray], out_of_band: bytes) -> None:
        """Begin a step."""
        self._mask, self._stepping = None, True
        # Begun again, it is a truncation whatever the actions.
        self._begin(lambda lane: lane.begin_step(codes, arrays, out_of_band))

    def wait(self, timeout: float | None) -> Batch:
        """The results of what was begun, again if asked again; errors as for any lane, and ``_wait``."""
        batch = self._wait(lambda lane, left_s: lane.wait(left_s), timeout)
        batch = self._with_last(batch, None if self._mask is None else ~self._mask)
        if self._mask is None:
            self._returned = True
        else:
            self._untold[self._mask] = False
        return batch

    def _with_last(self, batch: Batch, repeats: np.ndarray | None) -> Batch:
        """The batch; where an env has shown nothing in this session, with its last observation of the one before.

        ``repeats`` has one bool per row, whether it shows its last observation once more; by default its info says so.
        """
        env_ids = slice(None) if batch.env_ids is None else batch.env_ids
        if not self._unseen[env_ids].any():
            return batch
        unseen = self._unseen[env_ids] & (invalid_rows(batch) if repeats is None else repeats)
        self._unseen[env_ids] = unseen
        return with_earlier(batch, unseen, self._last)

    # --- parts of the batch -----------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Number of envs that were begun by ``begin_rows`` and not taken."""
        return int(self._under_way.sum())

    @property
    def are_outstanding(self) -> np.ndarray:
        """Mask of the envs that are outstanding."""
        return self._under_way

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these envs only; errors as for ``Lane.begin_rows``."""
        if self._under_way[env_ids].any():
            raise ValueError(f"envs {env_ids[self._under_way[env_ids]].tolist()} are under way; receive them first")

        def again(lane: HubLane) -> None:
            # Also those of other parts; a truncation whatever the actions.
            rows = np.flatnonzero(self._under_way & ~lane.are_outstanding)
            lane.send_rows(rows, codes, [np.repeat(batch[:1], len(rows), axis=0) for batch in arrays])

        self._stepping, self._tried = False, None
        self._under_way[env_ids] = True  # before it is known: at an interrupt, they may be
        try:
            self._begin(lambda lane: lane.begin_rows(env_ids, codes, arrays), again)
        except Exception:
            self._under_way[env_ids] = False
            raise

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        """The results of all outstanding envs that are done, once these are ``min_envs``; errors as for ``wait``."""

        def wait(lane: Lane, left_s: float | None) -> Batch:
            return lane.wait_rows(min_envs, left_s)

        return self._with_last(self._wait(wait, timeout), None)

    def taken(self, env_ids: np.ndarray) -> None:
        """Note that the results of these envs have reached the caller: they are outstanding no more."""
        self._under_way[env_ids] = self._untold[env_ids] = False
        if self._loss is None:
            self._lane.taken(env_ids)
