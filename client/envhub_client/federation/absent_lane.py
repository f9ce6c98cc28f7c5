"""The lane of rows whose hub was lost: each is truncated once, and goes on once it is on a hub again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import NoReturn

import numpy as np

from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import EnvHubError, HubTimeout, env_of, of_hub
from envhub.protocol.messages import Reset
from envhub.values import codec
from envhub_client.batch import Batch, invalid_rows, joined, with_earlier
from envhub_client.connection.failures import SESSION_ENDS
from envhub_client.deadline import Deadline
from envhub_client.federation.absent_rows import AbsentRows
from envhub_client.federation.part import HubPart
from envhub_client.lanes.base import HubLane
from envhub_client.session.absence import Absence

DONE_LOOK_S = 0.005  # between looks at whether all rows of a step are done


class AbsentLane:
    """A ``HubLane`` of rows that are on no hub, until ``absence`` is over, and then of ``lane_of`` its parts.

    A row's first step is a truncation with its last observation. Later steps wait for the rows' return as long as the
    absence has patience, and are truncations, too, where they do not return in time. Resets wait for the return, and so
    do later steps of some rows, which are given up where the absence fails.

    Attributes:
        name: of the lane that was lost.
        rows: the state of each row.
        others_serve: returns whether rows of other hubs wait for these; without any, a step waits for the return.
    """

    def __init__(
        self,
        lost: HubLane,
        outstanding: np.ndarray,
        loose: bool,
        absence: Absence[HubPart],
        lane_of: Callable[[Absence[HubPart]], HubLane],
    ) -> None:
        """Continue after a lane that was lost, of whose rows a mask says which were sent.

        With ``loose`` observations also have leaves of no fixed size.
        """
        self.name, self.num_envs, self.leaves = lost.name, lost.num_envs, lost.leaves
        # Before the absence begins, which ends the lost session.
        self.rows = AbsentRows(lost.last_observations(), outstanding)
        self.absence = absence
        self._loose = loose
        self._lane_of = lane_of
        self._lane: HubLane | None = None  # once the rows are on a hub again and something was begun there
        self._own: HubPart | None = None  # the one hub of this lane, where it stands for one of those of the absence
        self._begin: Callable[[HubLane], None] | None = None  # of all rows, which has not begun on a lane
        self._tried: tuple[int, ...] | None = None  # progress of the lane before ``_begin``, which may have begun there
        self._by_rows = False  # whether the step of all rows under way is one of each row by itself
        self._joined: Batch | None = None  # its results
        self._error: Exception | None = None  # that an env raised in it
        self._truncates = False  # whether the step of all rows under way is a truncation
        self._unreset: np.ndarray | None = None  # rows that the reset under way leaves out
        self._begun = 0
        self.others_serve: Callable[[], bool] = lambda: True

    @property
    def made(self) -> Sequence[HubPart]:
        """The parts that have the rows now, which are numbered from 0; none until they are on a hub again."""
        return self.absence.made if self._own is None else [self._own]

    @property
    def has_failed(self) -> bool:
        """True if the rows could not be made again in time, which is to be raised before it is tried again."""
        return self.absence.over and not self.made

    def successors(self, part: HubPart) -> list[HubPart]:
        """The parts that take the place of ``part``, whose lane this is; ``part`` itself as long as there are none.

        Each is of one hub. Its lane is one like this as long as some of its rows are to be truncated, or have no
        observation there. Nothing may be under way but steps of some rows, and ``settle`` must have been called.
        """
        is_settled = self.rows.are_settled
        if not self.made or (self._own is not None and not is_settled):
            return [part]
        parts = [each.moved(part.rows.start) for each in self.made]
        if not is_settled:
            for each, own in zip(parts, self.made, strict=True):
                each.lane = self._of(own)
        return parts

    def _of(self, part: HubPart) -> AbsentLane:
        """A lane like this of the rows of one of the parts that were made."""
        lane = copy(self)
        lane.num_envs, lane.rows = len(part.rows), self.rows.of(part.rows)
        lane._own, lane._lane = part.moved(-part.rows.start), part.lane
        return lane

    def hub_lane(self) -> HubLane:
        """The lane of the hubs that have the rows now; errors as for ``Absence.parts``."""
        self._lane = self._lane or self._lane_of(self.absence)
        return self._lane

    def settle(self) -> bool:
        """Wait for the end of what was given up; returns whether some rows are outstanding."""
        if self._lane is not None:
            self._lane.settle()
        return bool(self.outstanding)

    def give_up(self) -> None:
        """Give up what was begun, if anything was."""
        self._begin = self._tried = None
        if self._lane is not None:
            self._lane.give_up()

    def lose(self, loss: EnvHubError) -> None:
        """Raise the loss: the rows are being made again already."""
        raise loss

    def breach(self, row: int, what: str) -> None:
        """Raise that the hub that has the rows now broke the protocol."""
        self.hub_lane().breach(row, what)

    @property
    def progress(self) -> tuple[int, ...]:
        """Numbers that differ once another reset or step has begun."""
        return (self._begun,)

    def last_observations(self) -> list[np.ndarray]:
        """Copies of the rows' last observations; of those that have none on the hub that has them now, earlier ones."""
        rows = self.rows
        if self._lane is None:
            return [*map(np.ndarray.copy, rows.earlier)]
        lasts = self._lane.last_observations()
        rows.show_earlier(lasts, rows.unseen)
        return lasts

    def report_again(self) -> None:
        """Truncate the rows once more whose truncation was in a step that did not reach the caller."""
        self.rows.untold |= self.rows.reported

    # --- the whole batch ------------------------------------------------------------------------------------------

    def begin_reset(self, reset: Reset) -> None:
        """Begin a reset, as soon as the rows are on a hub again."""
        self._forget_last()
        self._truncates = self._by_rows = False
        self._begin = lambda lane: lane.begin_reset(reset)
        self._unreset = ~np.array(reset.mask or [True] * self.num_envs)
        self._begun += 1

    def _forget_last(self) -> None:
        """Forget what was begun before."""
        self._begin = self._tried = self._joined = self._error = self._unreset = None
        self.rows.reported[:] = False
        self.rows.forget(np.arange(self.num_envs))

    def begin_step(self, codes: bytes, arrays: Sequence[np.ndarray], out_of_band: bytes) -> None:
        """Begin a step. The arrays are copied."""
        self._forget_last()
        own = [array.copy() for array in arrays]
        untold = self.rows.untold
        # Rows that were reset since the loss, or stepped by themselves, are stepped; the others are truncated.
        self._by_rows = bool(untold.any() and not untold.all() and not out_of_band)
        self._truncates = bool(untold.any() and not self._by_rows)
        if self._by_rows:
            self.send_rows(np.arange(self.num_envs), codes, own)
        elif not self._truncates:
            self._begin = lambda lane: lane.begin_step(codes, own, out_of_band)
        self._begun += 1

    def wait(self, timeout: float | None, into: Sequence[np.ndarray] | None = None) -> Batch:
        """The results of what was begun; as ``HubLane.wait``."""
        rows = self.rows
        into = [np.empty_like(leaf) for leaf in rows.earlier] if into is None else into
        if self._by_rows:
            batch = self._of_all_rows(timeout)
            for array, leaf in zip(into, batch.observations, strict=True):
                array[...] = leaf
            return batch._replace(observations=into, env_ids=None)
        if not self._truncates and self._begin is not None:
            self._truncates = not self._begun_on_hub(timeout)
        if self._truncates:
            rows.reported |= rows.untold
            rows.untold[:] = False
            return self._truncation(np.arange(self.num_envs), into)._replace(env_ids=None)
        batch = self.hub_lane().wait(timeout, into)
        if self._unreset is not None:
            rows.untold &= self._unreset
        if rows.unseen.any():
            rows.unseen &= self._unreset if self._unreset is not None else invalid_rows(batch)
            rows.show_earlier(into, rows.unseen)
        return batch

    def _of_all_rows(self, timeout: float | None) -> Batch:
        """The results of all rows, of which some are truncated; errors as for ``wait``, once all rows are done."""
        deadline = None if timeout is None else Deadline(timeout)
        while self._joined is None and self.outstanding:
            try:
                self._joined = self._all_done()
            except (*SESSION_ENDS, HubTimeout):
                raise
            except Exception as error:  # of an env; the others are to be done, too
                if (env := env_of(error)) is None:
                    raise
                self._error = self._error or error
                self._taken_on_hub(np.array([env - self.made[0].connection.first_env]))
                continue
            if self._joined is None and deadline is not None and not deadline.left_s():
                self.raise_late()
            if self._joined is None:
                time.sleep(DONE_LOOK_S)
        if self._error is not None:
            self._taken_on_hub(np.arange(self.num_envs))
            self.rows.forget(np.arange(self.num_envs))
            raise self._error
        assert self._joined is not None
        self.rows.reported |= self.rows.untold
        self.taken(np.arange(self.num_envs))
        return self._joined

    def _all_done(self) -> Batch | None:
        """The results of the outstanding rows once all of them are done; None before."""
        if (self.has_failed or not (self.made or self.absence.patience_s)) and self.others_serve():
            self.rows.truncate_waiting()
        self.ask_rows()
        return self.wait_rows(1, 0) if self.done_rows() == self.outstanding else None

    def _begun_on_hub(self, timeout: float | None) -> bool:
        """True if what was begun is begun on the hub that has the rows now; False if a step waits no longer for one.

        Raises:
            HubTimeout: it is not within ``timeout`` seconds.
            Exception: as for ``Absence.parts``.
        """
        endless = self._unreset is not None or not self.others_serve()
        patience_s = None if endless else self.absence.patience_s
        waits_s = min((each for each in (patience_s, timeout) if each is not None), default=None)
        if not self.absence.wait(waits_s):
            if patience_s is not None and not self.absence.patience_s:
                return False
            self.raise_late()
        if self.has_failed and not endless:
            return False  # the other hubs have stepped; the next step raises it before they do
        assert self._begin is not None
        lane = self.hub_lane()
        if self._tried is None:
            self._tried = lane.progress
        if lane.progress == self._tried:  # else it was begun before an interrupt
            self._begin(lane)
        self._begin = self._tried = None
        return True

    def raise_late(self) -> NoReturn:
        """Raise that a wait has ended too early; of how many seconds it was, only the caller knows."""
        loss, made = self.absence.loss, self.made
        if made:
            late = f"not all envs that are made again on {', '.join(each.hub for each in made)} are done yet"
        else:
            late = f"{loss}; its envs are not made again yet"
        raise of_hub(HubTimeout(f"{late}: wait again"), made[0].hub if made else loss.hub) from loss

    def _truncation(self, rows: np.ndarray, into: Sequence[np.ndarray]) -> Batch:
        for array, last in zip(into, self.last_observations(), strict=True):
            array[...] = last[rows]
        loss = self.absence.loss
        info = failure_info(EnvFailure("hub_lost", f"{loss}; the env is made again", hub=loss.hub))
        blob = codec.encode_pair(b"", info) if self._loose else info
        count = len(rows)
        flags = np.zeros(count), np.zeros(count, bool), np.ones(count, bool)
        return Batch(into, *flags, [(row, blob) for row in rows.tolist()], [], rows)

    # --- some rows ------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Number of envs that were begun by ``begin_rows`` and not taken."""
        return int(self.are_outstanding.sum())

    @property
    def are_outstanding(self) -> np.ndarray:
        """Mask of the envs that are outstanding."""
        here: np.ndarray = self.rows.due | self.rows.are_waiting
        return here if self._lane is None else here | self._lane.are_outstanding

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these rows, of those that were truncated on the hub that has them, or will have them."""
        self.rows.send(env_ids, codes, arrays)

    def send_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these rows; there is nothing to confirm. The same again replaces it."""
        self.rows.send(env_ids, codes, arrays)

    def confirm_rows(self, timeout: float | None) -> None:
        """Do nothing: a hub that has the rows is asked by ``ask_rows``."""

    def ask_rows(self) -> None:
        """Begin what waits for a hub, once there is one, and ask for its results; nothing is waited for.

        Errors are those of ``Absence.parts``.
        """
        waiting = self.rows.waiting
        if waiting and self.absence.over:
            lane = self.hub_lane()
            while waiting:
                env_ids, codes, arrays = waiting[0]
                try:  # those before, and these where an interrupt came before they were noted as begun
                    lane.confirm_rows(0)
                except HubTimeout:
                    return
                if not (lane.are_outstanding | self.rows.untold)[env_ids].any():
                    lane.send_rows(env_ids, codes, arrays)
                waiting.pop(0)
        if self._lane is not None:
            self._lane.ask_rows()

    @property
    def waiting_rows(self) -> np.ndarray:
        """The outstanding rows whose steps begin once they are on a hub again."""
        return np.flatnonzero(self.rows.are_waiting)

    def _done_on_hub(self) -> int:
        """Number of rows whose results have come from the hub that has them now."""
        return self._lane.done_rows() if self._lane is not None and self._lane.outstanding else 0

    def done_rows(self) -> int:
        """Number of outstanding rows whose results can be returned; as ``HubLane.done_rows``."""
        return int(self.rows.due.sum()) + self._done_on_hub()

    def descriptors(self) -> Sequence[int]:
        """Descriptors of the hub's lane; before there is one, none: what waits for that looks again by itself."""
        return self._lane.descriptors() if self._lane is not None else ()

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        """The results of all outstanding rows that are done; as ``HubLane.wait_rows`` of what ``done_rows`` counts."""
        due, batches = np.flatnonzero(self.rows.due), []
        if due.size:
            batches.append(self._truncation(due, [leaf[due] for leaf in self.rows.earlier]))
        if self._lane is not None and self._done_on_hub():
            batches.append(self._with_earlier(self._lane.wait_rows(1, timeout)))
        return joined(batches)

    def _with_earlier(self, batch: Batch) -> Batch:
        """The batch of some rows; with earlier observations of those that show nothing on the hub yet."""
        rows, env_ids = self.rows, batch.env_ids
        rows.shown[env_ids] = True
        if not rows.unseen[env_ids].any():
            return batch
        assert env_ids is not None
        unseen = rows.unseen[env_ids] & invalid_rows(batch)
        rows.shown[env_ids[unseen]] = False
        return with_earlier(batch, unseen, rows.earlier)

    def taken(self, env_ids: np.ndarray) -> None:
        """Note that the results of these rows have reached the caller: they are outstanding no more."""
        self._taken_on_hub(env_ids)
        self.rows.note_told(env_ids)

    def _taken_on_hub(self, env_ids: np.ndarray) -> None:
        if self._lane is None:
            return
        own = env_ids[self._lane.are_outstanding[env_ids]]
        if own.size:  # the lane last: after an interrupt this is done once more
            self.rows.unseen[own] &= ~self.rows.shown[own]
            self._lane.taken(own)
