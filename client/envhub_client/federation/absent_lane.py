"""The lane of rows whose hub was lost: each is truncated once, and goes on once it is on a hub again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import HubLost, HubTimeout
from envhub.protocol.messages import Reset
from envhub.values import codec
from envhub_client.batch import Batch, joined
from envhub_client.deadline import Deadline, shown
from envhub_client.federation.absence import Absence
from envhub_client.lanes.base import HubLane

LOOK_S = 0.005  # between looks at whether all rows of a step are done

Rows = tuple[np.ndarray, bytes, list[np.ndarray]]


class AbsentLane:
    """A ``HubLane`` of rows that are on no hub, until ``absence`` is over, and then of ``lane_of`` its parts.

    A row's first step is a truncation with its last observation. Later steps wait for the rows' return as long as the
    absence has patience, and are truncations, too, where they do not return in time. Resets wait for the return, and so
    do later steps of some rows, which are given up where the absence fails.

    Attributes:
        others_serve: returns whether rows of other hubs wait for these; without any, a step waits for the return.
    """

    name = "absent"

    def __init__(
        self,
        lost: HubLane,
        outstanding: np.ndarray,
        loose: bool,
        absence: Absence,
        lane_of: Callable[[Absence], HubLane],
    ) -> None:
        """Continue after a lane that was lost, of whose rows a mask says which were sent.

        With ``loose`` observations also have leaves of no fixed size.
        """
        self.num_envs, self.leaves = lost.num_envs, lost.leaves
        self._last = lost.last_observations()  # before the absence begins, which ends the lost session
        self.absence = absence
        self._loose = loose
        self._lane_of = lane_of
        self._lane: HubLane | None = None  # once the rows are on a hub again and something was begun there
        self._untold = np.ones(self.num_envs, bool)  # whether the row's truncation was not returned yet
        self._unseen = np.ones(self.num_envs, bool)  # whether the row has shown nothing on the hub that has it again
        self._sent: np.ndarray = outstanding.copy()
        self._waiting: list[Rows] = []  # steps of some rows, begun when these are on a hub again
        self._begin: Callable[[HubLane], None] | None = None  # of all rows, which has not begun on a lane
        self._by_rows = False  # whether the step of all rows under way is one of each row by itself
        self._joined: Batch | None = None  # its results
        self._truncates = False  # whether the step of all rows under way is a truncation
        self._reported = np.zeros(self.num_envs, bool)  # rows whose truncation the step under way returned first
        self._unreset: np.ndarray | None = None  # rows that the reset under way leaves out
        self._begun = 0
        self.others_serve: Callable[[], bool] = lambda: True

    @property
    def is_replaceable(self) -> bool:
        """True if the rows are on a hub again, truncated, and have observations there: its lanes can take the place."""
        return self.absence.over and not (self._untold | self._unseen).any() and not self._sent.any()

    def hub_lane(self) -> HubLane:
        """The lane of the hubs that have the rows now; errors as for ``Absence.parts``."""
        self._lane = self._lane or self._lane_of(self.absence)
        return self._lane

    def settle(self) -> bool:
        """True if some rows are outstanding."""
        return bool(self._sent.any())

    def give_up(self) -> None:
        """Give up what was begun, if anything was."""
        self._begin = None
        if self._lane is not None:
            self._lane.give_up()

    def lose(self, loss: HubLost) -> None:
        """Raise the loss: the rows are being made again already."""
        raise loss

    @property
    def progress(self) -> tuple[int, ...]:
        """Numbers that differ once another reset or step has begun."""
        return (self._begun,)

    def last_observations(self) -> list[np.ndarray]:
        """Copies of the rows' last observations; of those that have none on the hub that has them now, earlier ones."""
        return [leaf.copy() for leaf in self._last]

    def earlier_observations(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Mask of the rows that have no observation on the hub that has them now, and the last ones of all rows."""
        return self._unseen.copy(), self.last_observations()

    def report_again(self) -> None:
        """Truncate the rows once more whose truncation was in a step that did not reach the caller."""
        self._untold |= self._reported

    # --- the whole batch ------------------------------------------------------------------------------------------

    def begin_reset(self, reset: Reset) -> None:
        """Begin a reset, as soon as the rows are on a hub again."""
        self._truncates = self._by_rows = False
        self._begin = lambda lane: lane.begin_reset(reset)
        self._reported[:] = False
        self._unreset = ~np.array(reset.mask or [True] * self.num_envs)
        self._begun += 1

    def begin_step(self, codes: bytes, arrays: Sequence[np.ndarray], out_of_band: bytes) -> None:
        """Begin a step. The arrays are copied."""
        own = [array.copy() for array in arrays]
        untold, self._unreset, self._begin = self._untold.any(), None, None
        self._reported[:] = False
        # Rows that were reset since the loss, or stepped by themselves, are stepped; the others are truncated.
        self._by_rows = bool(untold and not self._untold.all() and not out_of_band)
        self._truncates, self._joined = bool(untold and not self._by_rows), None
        if self._by_rows:
            self.send_rows(np.arange(self.num_envs), codes, own)
        elif not self._truncates:
            self._begin = lambda lane: lane.begin_step(codes, own, out_of_band)
        self._begun += 1

    def wait(self, timeout: float | None, into: Sequence[np.ndarray] | None = None) -> Batch:
        """The results of what was begun; as ``HubLane.wait``."""
        into = [np.empty_like(leaf) for leaf in self._last] if into is None else into
        if self._by_rows:
            self._joined = self._joined or self._of_all_rows(timeout)
            for array, leaf in zip(into, self._joined.observations, strict=True):
                array[...] = leaf
            return self._joined._replace(observations=into, env_ids=None)
        if not self._truncates and self._begin is not None:
            self._truncates = not self._begun_on_hub(timeout)
        if self._truncates:
            self._reported |= self._untold
            self._untold[:] = False
            return self._truncation(np.arange(self.num_envs), into)._replace(env_ids=None)
        batch = self.hub_lane().wait(timeout, into)
        if self._unreset is not None:
            for array, last in zip(into, self._last, strict=True):
                array[self._unreset] = last[self._unreset]
            self._untold &= self._unreset
        self._unseen &= False if self._unreset is None else self._unreset
        for array, last in zip(into, self._last, strict=True):
            last[...] = array
        return batch

    def _of_all_rows(self, timeout: float | None) -> Batch:
        """The results of all rows, of which some are truncated; errors as for ``wait``."""
        deadline, rows = None if timeout is None else Deadline(timeout), np.arange(self.num_envs)
        while True:
            self.ask_rows()
            if not self.absence.patience_s:
                self._truncate_waiting()
            if self.done_rows() == self.num_envs:
                break
            if deadline is not None and not deadline.left_s():
                late = f"not all of its envs are done within {shown(deadline.timeout)} s"
                raise HubTimeout(f"{self.absence.loss}; {late}: wait again") from self.absence.loss
            time.sleep(LOOK_S)
        batch = self.wait_rows(self.num_envs, 0)
        self._reported |= self._untold
        self.taken(rows)
        return batch

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
            assert waits_s is not None
            text = f"{self.absence.loss}; its envs are not made again within {shown(waits_s)} s: wait again"
            raise HubTimeout(text) from self.absence.loss
        assert self._begin is not None
        self._begin(self.hub_lane())
        self._begin = None
        return True

    def _truncation(self, rows: np.ndarray, into: Sequence[np.ndarray]) -> Batch:
        for array, last in zip(into, self._last, strict=True):
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
        return int(self._sent.sum())

    @property
    def are_outstanding(self) -> np.ndarray:
        """Mask of the envs that are outstanding."""
        return self._sent

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these rows, of those that were truncated on the hub that has them, or will have them."""
        self._sent[env_ids] = True
        later = ~self._untold[env_ids]
        if later.any():
            self._waiting.append((env_ids[later], codes, [array[later].copy() for array in arrays]))

    def send_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these rows; there is nothing to confirm. The same again replaces it."""
        self._forget(env_ids)
        self.begin_rows(env_ids, codes, arrays)

    def confirm_rows(self, timeout: float | None) -> None:
        """Do nothing: a hub that has the rows is asked by ``ask_rows``."""

    def _forget(self, env_ids: np.ndarray) -> None:
        """Begin no step of these rows any more that waits for a hub."""
        self._waiting = [each for each in self._waiting if not np.isin(each[0], env_ids).any()]

    def ask_rows(self) -> None:
        """Begin what waits for a hub, once there is one, and ask for its results.

        Errors are those of ``Absence.parts``.
        """
        if self._waiting and self.absence.over:
            lane = self.hub_lane()
            while self._waiting:
                rows = self._waiting[0]
                lane.confirm_rows(None)  # of these rows, where an interrupt came before they were noted as begun
                if not (lane.are_outstanding | self._untold)[rows[0]].any():
                    lane.begin_rows(*rows)
                self._waiting.pop(0)
        if self._lane is not None:
            self._lane.ask_rows()

    @property
    def waiting_rows(self) -> np.ndarray:
        """The outstanding rows whose steps begin once they are on a hub again."""
        return np.array([row for env_ids, *_ in self._waiting for row in env_ids.tolist()], int)

    def _truncate_waiting(self) -> None:
        """Truncate the rows whose steps wait for a hub."""
        while self._waiting:
            self._untold[self._waiting[0][0]] = True
            self._waiting.pop(0)

    def _truncated_rows(self) -> np.ndarray:
        """The outstanding rows that are truncated now."""
        rows: np.ndarray = np.flatnonzero(self._sent & self._untold)
        return rows

    def done_rows(self) -> int:
        """Number of outstanding rows whose results can be returned; as ``HubLane.done_rows``."""
        on_hub = self._lane.done_rows() if self._lane is not None and self._lane.outstanding else 0
        return len(self._truncated_rows()) + on_hub

    def descriptors(self) -> Sequence[int]:
        """Descriptors of the hub's lane; before there is one, none: what waits for that looks again by itself."""
        return self._lane.descriptors() if self._lane is not None else ()

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        """The results of all outstanding rows that are done; as ``HubLane.wait_rows`` of what ``done_rows`` counts."""
        rows, batches = self._truncated_rows(), []
        if rows.size:
            batches.append(self._truncation(rows, [leaf[rows] for leaf in self._last]))
        if self._lane is not None and self._lane.done_rows():
            batches.append(batch := self._lane.wait_rows(1, timeout))
            for array, last in zip(batch.observations, self._last, strict=True):
                last[batch.env_ids] = array
            self._unseen[batch.env_ids] = False
        return joined(batches)

    def taken(self, env_ids: np.ndarray) -> None:
        """Note that the results of these rows have reached the caller: they are outstanding no more."""
        if self._lane is not None:
            on_hub = self._lane.are_outstanding[env_ids]
            self._lane.taken(env_ids[on_hub])
        self._forget(env_ids)
        self._sent[env_ids] = self._untold[env_ids] = False
