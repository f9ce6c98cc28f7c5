"""A lane that outlives its hub: when that is lost, the envs go on in a new session, and every episode was truncated.

The new session is told why, and its workers answer the first step of every env that no reset came before with that
truncation, as they do for an env that was made again after its worker had died. So a request that finds its hub lost
is begun again in the new session, and this file holds nothing about episodes. What a new session cannot know is what
its envs showed last in the old one: that is put in here, until an env has shown something in the new session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from envhub.errors import HubLost
from envhub.protocol.messages import Reset
from envhub.values import codec
from envhub_client.lanes.choice import PlainLane
from envhub_client.lanes.wire import Outcome, Part

ATTEMPTS_MAX = 3  # of one request, each on another hub

Renew = Callable[[HubLost, Callable[[PlainLane], None]], None]
Begin = Callable[[PlainLane], None]
Found = TypeVar("Found", Outcome, Part)


def _nothing(lane: PlainLane) -> None:
    pass


class LastingLane:
    """A lane, and the one after it, and so on; otherwise as a lane.

    Attributes:
        num_envs: as of every one of them.
    """

    def __init__(self, lane: PlainLane, renew: Renew) -> None:
        """Begin with ``lane``.

        Args:
            lane: the first one.
            renew: makes a new session after this loss, and has its lane adopted; raises where it cannot.
        """
        self.num_envs = lane.num_envs
        self._lane = lane
        self._renew = renew
        self._last = [np.zeros((lane.num_envs, *leaf.shape), leaf.dtype) for leaf in lane.leaves]
        self._unseen = np.zeros(lane.num_envs, bool)  # of which no env of this session has shown anything yet
        self._mask: np.ndarray | None = None  # which rows the reset under way resets
        self._under_way = np.zeros(lane.num_envs, bool)  # of the rows of parts
        self._again: Begin = _nothing  # begins on another lane what is under way
        self._loss: HubLost | None = None  # while it is set, nothing is under way on ``_lane``

    @property
    def name(self) -> str:
        """How the envs are stepped now."""
        return self._lane.name

    def stop(self) -> None:
        """Renew no more: the envs are being closed."""

        def refuse(error: HubLost, adopt: Callable[[PlainLane], None]) -> None:
            raise error

        self._renew = refuse

    def lose(self, error: HubLost) -> None:
        """Go on with the next hub, since this one was found to be lost by something else than a step or reset.

        Raises:
            HubLost: there is no other.
        """
        self._loss, self._again = error, _nothing
        self._recover(error)

    def _recover(self, loss: HubLost) -> None:
        self._renew(loss, self._adopt)
        try:
            self._again(self._lane)
        except HubLost as error:
            self._loss = error
            return
        self._loss = None  # last: after an interrupt it is all done again, in a session that has told nothing yet

    def _adopt(self, lane: PlainLane) -> None:
        self._unseen[:] = True
        self._lane = lane

    def settle(self) -> bool:
        """Wait for what an interrupt kept from being known; whether rows of parts are under way."""
        try:
            if self._loss is None:
                self._lane.settle()
        except HubLost as error:
            self._loss = error
        return bool(self._under_way.any())

    def _begin(self, begin: Begin, again: Begin) -> None:
        """Begin this now, or if the hub is lost, ``again`` when it is collected."""
        self._again = again
        try:
            if self._loss is None:
                begin(self._lane)
        except HubLost as error:
            self._loss = error

    def _collect(self, collect: Callable[[PlainLane], Found]) -> Found:
        """What is under way has come to, if need be on another hub.

        ``timeout`` does not count for the making of another session.

        Raises:
            HubLost: there is no other hub.
        """
        loss: HubLost | None = None
        for _ in range(ATTEMPTS_MAX):
            if self._loss is not None:
                self._recover(self._loss)
            try:
                if self._loss is None:
                    return collect(self._lane)
            except HubLost as error:
                self._loss = error
            loss = self._loss
        assert loss is not None
        raise loss

    # --- the whole batch --------------------------------------------------------------------------------------------

    def post_reset(self, reset: Reset) -> None:
        """Begin a reset."""
        self._mask = np.array(reset.mask or [True] * self.num_envs)

        def begin(lane: PlainLane) -> None:
            lane.post_reset(reset)

        self._begin(begin, begin)

    def post_step(self, codes: bytes, arrays: Sequence[np.ndarray], beside: bytes) -> None:
        """Begin a step."""
        self._mask = None

        def begin(lane: PlainLane) -> None:
            lane.post_step(codes, arrays, beside)  # begun again, it is a truncation whatever the actions

        self._begin(begin, begin)

    def collect(self, timeout: float | None) -> Outcome:
        """Wait for what was begun, and return it, again if asked again; errors as for any lane, and ``_collect``."""
        outcome = self._collect(lambda lane: lane.collect(timeout))
        every = np.arange(self.num_envs)
        left_out = None if self._mask is None else ~self._mask
        return outcome._replace(observations=self._with_last(outcome, every, left_out))

    def _with_last(self, found: Outcome | Part, env_ids: np.ndarray, repeats: np.ndarray | None) -> list[np.ndarray]:
        """The observations, where an env has shown none in this session the last one of the session before.

        Args:
            found: what came.
            env_ids: of which rows.
            repeats: one bool per row, whether it shows its last observation once more; by default its info says so.
        """
        observations = found.observations
        if self._unseen[env_ids].any():
            unseen = self._unseen[env_ids] & (_invalid(found.rows, env_ids) if repeats is None else repeats)
            observations = [leaf.copy() for leaf in observations]
            for last, leaf in zip(self._last, observations, strict=True):
                leaf[unseen] = last[env_ids[unseen]]
            self._unseen[env_ids] = unseen
        for last, leaf in zip(self._last, observations, strict=True):
            last[env_ids] = leaf
        return observations

    # --- parts of the batch -----------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """How many envs were posted by ``post_rows`` and not taken."""
        return int(self._under_way.sum())

    def post_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these envs only.

        Raises:
            ValueError: one of them is under way, or others are with actions of a dtype of another size.
        """
        if self._under_way[env_ids].any():
            raise ValueError(f"envs {env_ids[self._under_way[env_ids]].tolist()} are under way; receive them first")

        def again(lane: PlainLane) -> None:
            rows = np.flatnonzero(self._under_way)  # also those of other parts; a truncation whatever the actions
            lane.post_rows(rows, codes, [np.repeat(batch[:1], len(rows), axis=0) for batch in arrays])

        self._under_way[env_ids] = True  # before it is known: at an interrupt, they may be
        try:
            self._begin(lambda lane: lane.post_rows(env_ids, codes, arrays), again)
        except Exception:
            self._under_way[env_ids] = False
            raise

    def collect_rows(self, min_envs: int, timeout: float | None) -> Part:
        """Wait until so many envs that are under way are done, and return all that are; errors as for ``collect``."""
        part = self._collect(lambda lane: lane.collect_rows(min_envs, timeout))
        return part._replace(observations=self._with_last(part, part.env_ids, None))

    def taken(self, env_ids: np.ndarray) -> None:
        """Know that whoever waited for these envs has them."""
        self._under_way[env_ids] = False
        self._lane.taken(env_ids)


def _invalid(rows: Sequence[tuple[int, bytes]], env_ids: np.ndarray) -> np.ndarray:
    """Which of these rows' outcomes are no transition of an env's, as their infos say."""
    found = np.zeros(len(env_ids), bool)
    for row, blob in rows:
        info = codec.decode_leniently(blob)[0] if blob else {}
        if isinstance(info, list):  # beside observations of no fixed size
            info = codec.decode_leniently(info[1])[0] if info[1] else {}
        found[np.searchsorted(env_ids, row)] = bool(info.get("invalid_transition"))
    return found
