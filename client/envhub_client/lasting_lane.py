"""A lane that outlives its hub: when that is lost, the envs go on in a new session, and every episode was truncated.

A row is **owed** its truncation from the loss until a step or part has told it, or a reset has begun another episode. A
row of a part is **aside** while it is under way for its caller though nothing runs: it only waits to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from envhub import codec
from envhub.env_failure import EnvFailure
from envhub.errors import HubLost
from envhub.messages import Reset
from envhub_client.lane_choice import PlainLane
from envhub_client.lanes import Outcome, Part, joined

RESETS_MAX = 3  # of one reset, each on another hub


Renew = Callable[[HubLost, Callable[[PlainLane], None]], None]


class LastingLane:
    """A lane, and the one after it, and so on; otherwise as a lane.

    Attributes:
        num_envs: as of every one of them.
    """

    def __init__(self, lane: PlainLane, renew: Renew, loose: bool) -> None:
        """Begin with ``lane``.

        Args:
            lane: the first one.
            renew: makes a new session after this loss, and has its lane adopted; raises where it cannot.
            loose: whether observations have leaves of no fixed size, so that every row comes with those, too.
        """
        self.num_envs = lane.num_envs
        self._lane = lane
        self._renew = renew
        self._last = [np.zeros((lane.num_envs, *leaf.shape), leaf.dtype) for leaf in lane.leaves]
        self._loose = loose
        self._nothing = codec.encode([b"", b""]) if loose else b""
        self._info = self._nothing  # what is said of an env that is owed its truncation
        self._loss: HubLost | None = None
        self._owed = np.zeros(lane.num_envs, bool)
        self._told = False  # whether the last step told every row
        self._reset: Reset | None = None  # the one under way
        self._aside = np.zeros(lane.num_envs, bool)
        self._under_way = np.zeros(lane.num_envs, bool)

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
        self._loss = error
        self._recover()

    def _recover(self) -> None:
        assert self._loss is not None
        self._renew(self._loss, self._adopt)

    def _adopt(self, lane: PlainLane) -> None:
        failure = EnvFailure("hub_lost", f"{self._loss}; the env was made anew")
        info = codec.encode({"env_failure": dict(failure), "invalid_transition": True})
        self._info = codec.encode([b"", info]) if self._loose else info
        self._aside |= self._under_way
        self._under_way[:] = False
        self._owed[:] = True
        self._lane = lane
        self._loss = None  # last: after an interrupt it is all done again

    # --- the whole batch --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for what an interrupt kept from being known."""
        try:
            if self._loss is None:
                self._lane.settle()
        except HubLost as error:
            self._loss = error

    def _forget(self) -> None:
        """Know that what was collected last has reached its caller."""
        if self._told:
            self._owed[:] = self._told = False
        self._reset = None

    def post_reset(self, reset: Reset) -> None:
        """Begin a reset."""
        self._forget()
        self._reset = reset
        self._post(lambda: self._lane.post_reset(reset))

    def post_step(self, codes: bytes, arrays: Sequence[np.ndarray], beside: bytes) -> None:
        """Begin a step; of envs that are owed their truncation there is none."""
        self._forget()
        if not self._owed.any():
            self._post(lambda: self._lane.post_step(codes, arrays, beside))

    def _post(self, post: Callable[[], None]) -> None:
        try:
            if self._loss is None:
                post()
        except HubLost as error:
            self._loss = error

    def collect(self, timeout: float | None) -> Outcome:
        """Wait for what was begun; errors as for any lane.

        ``timeout`` does not count for the making of another session.

        Raises:
            HubLost: there is no other hub.
        """
        if self._reset is not None:
            return self._collect_reset(self._reset, timeout)
        try:
            if self._loss is None and not self._owed.any():
                return self._kept(self._lane.collect(timeout))
        except HubLost as error:
            self._loss = error
        if self._loss is not None:
            self._recover()
        self._told = True
        flags = np.zeros(self.num_envs, bool)
        rows = [(row, self._info) for row in range(self.num_envs)]
        return Outcome([leaf.copy() for leaf in self._last], np.zeros(self.num_envs), flags, ~flags, rows, [])

    def _collect_reset(self, reset: Reset, timeout: float | None) -> Outcome:
        """The reset's outcome, if need be on another hub; envs that it leaves out keep their last observation."""
        for attempt in range(RESETS_MAX):
            if self._loss is not None:
                self._recover()
                self._post(lambda: self._lane.post_reset(reset))
            if self._loss is None:
                try:
                    outcome = self._lane.collect(timeout)
                    break
                except HubLost as error:
                    self._loss = error
            if attempt == RESETS_MAX - 1:
                raise self._loss
        self._owed &= ~np.array(reset.mask or [True] * self.num_envs)
        if self._owed.any():
            outcome = self._patched(outcome)
        return self._kept(outcome)

    def _patched(self, outcome: Outcome) -> Outcome:
        """The outcome, with what envs that are owed a truncation showed last."""
        observations = [leaf.copy() for leaf in outcome.observations]
        for leaf, last in zip(observations, self._last, strict=True):
            leaf[self._owed] = last[self._owed]
        rows = [(row, self._nothing if self._owed[row] else blob) for row, blob in outcome.rows]
        return outcome._replace(observations=observations, rows=rows)

    def _kept(self, outcome: Outcome) -> Outcome:
        for last, leaf in zip(self._last, outcome.observations, strict=True):
            np.copyto(last, leaf)
        return outcome

    # --- parts of the batch -----------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """How many envs were posted by ``post_rows`` and not taken."""
        return int((self._under_way | self._aside).sum())

    def post_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these envs only; those that are owed their truncation only wait for it.

        Raises:
            ValueError: one of them is under way, or others are with actions of a dtype of another size.
        """
        self._forget()
        if self._aside[env_ids].any():
            raise ValueError(f"envs {env_ids[self._aside[env_ids]].tolist()} are under way; receive them first")
        owed = self._owed[env_ids]
        posted = env_ids[~owed]
        if posted.size:
            if self._under_way[posted].any():
                raise ValueError(f"envs {posted[self._under_way[posted]].tolist()} are under way; receive them first")
            self._under_way[posted] = True  # before it is known: at an interrupt, they may be
            try:
                self._post(lambda: self._lane.post_rows(posted, codes, [batch[~owed] for batch in arrays]))
            except Exception:
                self._under_way[posted] = False
                raise
        self._aside[env_ids[owed]] = True

    def collect_rows(self, min_envs: int, timeout: float | None) -> Part:
        """Wait until so many envs that are under way are done, and return all that are; errors as for ``collect``."""
        missing = min_envs - int(self._aside.sum())
        try:
            if self._loss is None and missing > 0:
                part = self._lane.collect_rows(missing, timeout)
                for last, leaf in zip(self._last, part.observations, strict=True):
                    last[part.env_ids] = leaf
                return joined([self._part_aside(), part]) if self._aside.any() else part
        except HubLost as error:
            self._loss = error
        if self._loss is not None:
            self._recover()
        return self._part_aside()

    def _part_aside(self) -> Part:
        env_ids = np.flatnonzero(self._aside)
        flags = np.zeros(len(env_ids), bool)
        rows = [(row, self._info) for row in env_ids.tolist()]
        seen = [leaf[env_ids] for leaf in self._last]
        return Part(env_ids, seen, np.zeros(len(env_ids)), flags, ~flags, rows, [])

    def taken(self, env_ids: np.ndarray) -> None:
        """Know that whoever waited for these envs has them."""
        aside = self._aside[env_ids]
        self._owed[env_ids[aside]] = self._aside[env_ids[aside]] = False
        if not aside.all():
            self._under_way[env_ids] = False
            self._lane.taken(env_ids[~aside])
