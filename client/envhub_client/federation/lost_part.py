"""The rows of a part whose session is over: each is truncated once, and goes on once it is on a hub again.

A part is PRESENT; LOST as long as its rows are on no hub; then BACK, until each row was truncated and has given an
observation of the hub that has it now. Its lane is a ``LostPart`` while it is LOST or BACK.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import NoReturn

import numpy as np

from envhub.arena.layout import are_whole_workers
from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import HubTimeout, SnapshotLost, env_of, of_hub
from envhub.protocol.messages import Reset
from envhub.values import codec
from envhub_client.connection.failures import SESSION_ENDS
from envhub_client.deadline import Deadline
from envhub_client.federation.part import HubPart
from envhub_client.federation.rebuild import Rebuild
from envhub_client.lanes.base import Batch, Lane, joined

DONE_LOOK_S = 0.005  # between looks at whether all rows of a step are done

Step = tuple[np.ndarray, bytes, list[np.ndarray]]  # of some rows: their numbers, codes and actions


class LostRows:
    """Results that each row has returned since its session was over, and those that it is to return, by masks."""

    def __init__(self, earlier: Sequence[np.ndarray], sent: np.ndarray) -> None:
        count = len(sent)
        self.earlier = earlier
        self.truncation_pending = np.ones(count, bool)  # it was not returned yet
        self.no_new_observation = np.ones(count, bool)  # of the hub that has the row again was returned
        self.truncates: np.ndarray = sent.copy()  # was sent, and returns a truncation
        self.waiting: list[Step] = []  # which begin once their rows are on a hub again
        self.has_observation = np.zeros(count, bool)  # outstanding, with an observation of that hub
        self.reported = np.zeros(count, bool)  # truncated first by the last step of all rows

    def of(self, rows: range) -> LostRows:
        own = slice(rows.start, rows.stop)
        part = LostRows([leaf[own] for leaf in self.earlier], self.truncates[own])
        part.truncation_pending = self.truncation_pending[own].copy()
        part.no_new_observation = self.no_new_observation[own].copy()
        for env_ids, codes, arrays in self.waiting:
            places = np.flatnonzero((rows.start <= env_ids) & (env_ids < rows.stop))
            if places.size:
                part.waiting.append((env_ids[places] - rows.start, codes, [array[places] for array in arrays]))
        return part

    @property
    def are_waiting(self) -> np.ndarray:
        mask = np.zeros(len(self.truncates), bool)
        for env_ids, *_ in self.waiting:
            mask[env_ids] = True
        return mask

    @property
    def are_settled(self) -> bool:
        """True if every row was truncated and has an observation on its hub, and none waits for either."""
        return not (self.waiting or (self.truncation_pending | self.no_new_observation | self.truncates).any())

    def send(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Send these rows: each is truncated, or if it was already, waits for a hub. The same again replaces it."""
        self.forget(env_ids)
        pending = self.truncation_pending[env_ids]
        self.truncates[env_ids[pending]] = True
        if not pending.all():
            self.waiting.append((env_ids[~pending], codes, [array[~pending] for array in arrays]))

    def truncate_waiting(self) -> None:
        waiting = self.are_waiting
        self.truncation_pending |= waiting
        self.truncates |= waiting
        self.waiting = []

    def show_earlier(self, observations: Sequence[np.ndarray]) -> None:
        """Put the last observations of rows without a new one into those of all rows."""
        rows = self.no_new_observation
        for array, leaf in zip(observations, self.earlier, strict=True):
            array[rows] = leaf[rows]

    def forget(self, rows: np.ndarray) -> None:
        self.truncates[rows] = False
        self.waiting = [each for each in self.waiting if not np.isin(each[0], rows).any()]


def _invalid_rows(batch: Batch) -> np.ndarray:
    """Mask of the rows of a step's batch whose results are no transition of their env, as their infos say."""
    assert batch.rewards is not None
    invalid = np.zeros(len(batch.rewards), bool)
    for row, blob in batch.rows:
        index = row if batch.env_ids is None else np.searchsorted(batch.env_ids, row)
        try:
            info = codec.decode_leniently(blob)[0] if blob else {}
            if isinstance(info, list):  # an info that came with observations of no fixed size
                info = codec.decode_leniently(info[1])[0] if info[1] else {}
            invalid[index] = bool(info.get("invalid_transition"))
        except (ValueError, TypeError, LookupError, AttributeError):
            continue  # it breaks the protocol, which is found when the batch is read
    return invalid


class LostPart:
    """A ``Lane`` of rows that are on no hub, until ``rebuild`` is over, and then of ``lane_of`` its parts.

    A row's first step is a truncation with its last observation. Later steps wait for the rows' return as long as the
    rebuild has patience, and are truncations, too, where they do not return in time. Resets wait for the return, and so
    do later steps of some rows, which are given up where the rebuild fails. Where no other row is to wait, patience has
    no end: then also the first step of all rows waits, and raises why there is no other hub.
    """

    def __init__(
        self,
        lost: Lane,
        outstanding: np.ndarray,
        has_object_leaves: bool,
        rebuild: Rebuild,
        lane_of: Callable[[Sequence[HubPart]], Lane],
        workers: int | None = None,
    ) -> None:
        """Continue after ``lost``; rows of a vector env have ``workers``, each of which steps its rows in one call."""
        self.name, self.num_envs, self.leaves = lost.name, lost.num_envs, lost.leaves
        # Before the rebuild begins, which ends the lost session.
        self.rows = LostRows(lost.last_observations(), outstanding)
        self.rebuild = rebuild
        self._has_object_leaves, self._lane_of, self._workers = has_object_leaves, lane_of, workers
        self._lane: Lane | None = None  # once the rows are on a hub again and something was begun there
        self._own: HubPart | None = None  # the one hub of this lane, where it stands for one of those of the rebuild
        self._begin: Callable[[Lane], None] | None = None  # of all rows, which has not begun on a lane
        self._tried: tuple[int, ...] | None = None  # progress of the lane before ``_begin``, which may have begun there
        self._by_rows = False  # whether the step of all rows under way is one of each row by itself
        self._joined: Batch | None = None  # its results
        self._error: Exception | None = None  # that an env raised in it
        self._unreset: np.ndarray | None = None  # rows that the reset under way leaves out
        self._begun = 0
        self.others_serve: Callable[[], bool] = lambda: True  # else a step waits for the return, whatever the patience

    @property
    def made(self) -> Sequence[HubPart]:
        """The parts that have the rows now, which are numbered from 0; none until they are on a hub again."""
        return self.rebuild.made if self._own is None else [self._own]

    @property
    def has_failed(self) -> bool:
        """True if the rows could not be made again in time, which is to be raised before it is tried again."""
        return self.rebuild.over and not self.made

    def successors(self, part: HubPart) -> list[HubPart]:
        """The parts in place of ``part``, whose lane this is, each of one hub; itself as long as there are none.

        Nothing may be under way but steps of some rows, and ``settle`` must have been called.
        """
        is_settled = self.rows.are_settled
        if not self.made or (self._own is not None and not is_settled):
            return [part]
        parts = [each.moved(part.rows.start) for each in self.made]
        if not is_settled:
            for each, own in zip(parts, self.made, strict=True):
                each.lane = self._of(own)
        return parts

    def _of(self, part: HubPart) -> LostPart:
        lane = copy(self)
        lane.num_envs, lane.rows = len(part.rows), self.rows.of(part.rows)
        lane._own, lane._lane = part.moved(-part.rows.start), part.lane
        return lane

    def _hub_lane(self) -> Lane:
        """The lane of the hubs that have the rows now; errors as for ``Rebuild.parts``."""
        self._lane = self._lane or self._lane_of(self.rebuild.parts())
        return self._lane

    def settle(self) -> bool:
        if self._lane is not None:
            self._lane.settle()
        return bool(self.outstanding)

    def give_up(self) -> None:
        self.rows.truncation_pending |= self.rows.reported  # those that do not reach the caller
        self._forget_last()

    def breach(self, row: int, what: str) -> None:
        self._hub_lane().breach(row, what)

    @property
    def progress(self) -> tuple[int, ...]:
        return (self._begun,)

    def last_observations(self) -> list[np.ndarray]:
        if self._lane is None:
            return [*map(np.ndarray.copy, self.rows.earlier)]
        lasts = self._lane.last_observations()
        self.rows.show_earlier(lasts)
        return lasts

    def await_back(self, timeout: float | None) -> None:
        """Wait until the rows are on a hub again; errors as for ``Rebuild.parts``, and ``HubTimeout``."""
        if not self.rebuild.wait(timeout):
            self._raise_late()
        self.rebuild.parts()

    def _raise_late(self) -> NoReturn:
        """Raise that a wait has ended too early; of how many seconds it was, only the caller knows."""
        loss, made = self.rebuild.loss, self.made
        if made:
            late = f"not all envs that are made again on {', '.join(each.hub for each in made)} are done yet"
        else:
            late = f"{loss}; its envs are not made again yet"
        raise of_hub(HubTimeout(f"{late}: wait again"), made[0].hub if made else loss.hub) from loss

    def begin_reset(self, reset: Reset) -> None:
        self._forget_last()
        if reset.snapshot:
            loss = self.rebuild.loss
            raise of_hub(SnapshotLost(f"{loss}, and with it what its envs were restored from"), loss.hub)
        self._begin = lambda lane: lane.begin_reset(reset)
        self._unreset = ~np.array(reset.mask or [True] * self.num_envs)
        self._begun += 1

    def _forget_last(self) -> None:
        self._begin = self._tried = self._joined = self._error = self._unreset = None
        self._by_rows = self.rows.reported[:] = False
        self.rows.forget(np.arange(self.num_envs))

    def begin_step(self, codes: bytes, arrays: Sequence[np.ndarray], out_of_band: bytes) -> None:
        self._forget_last()
        own = [array.copy() for array in arrays]
        pending = self.rows.truncation_pending
        if pending.any():  # those that were reset since the loss, or stepped by themselves, step, if they can
            others = np.flatnonzero(~pending).tolist()
            is_torn = self._workers is not None and not are_whole_workers(others, self.num_envs, self._workers)
            pending[:] |= bool(out_of_band) or is_torn
            self._by_rows = True
            self.begin_rows(np.arange(self.num_envs), codes, own)
        else:
            self._begin = lambda lane: lane.begin_step(codes, own, out_of_band)
        self._begun += 1

    def wait(self, timeout: float | None, into: Sequence[np.ndarray] | None = None) -> Batch:
        rows = self.rows
        into = [np.empty_like(leaf) for leaf in rows.earlier] if into is None else into
        if self._begin is not None and not self._begun_on_hub(timeout):
            rows.truncation_pending[:] = rows.truncates[:] = True
            self._begin, self._by_rows = None, True
        if self._by_rows:
            batch = self._of_all_rows(timeout)
            for array, leaf in zip(into, batch.observations, strict=True):
                array[...] = leaf
            return batch._replace(observations=into, env_ids=None)
        batch = self._hub_lane().wait(timeout, into)
        if self._unreset is not None:
            rows.truncation_pending &= self._unreset
        if rows.no_new_observation.any():
            rows.no_new_observation &= self._unreset if self._unreset is not None else _invalid_rows(batch)
            rows.show_earlier(into)
        return batch

    def _of_all_rows(self, timeout: float | None) -> Batch:
        """The results of all rows, of which some are truncated; errors as for ``wait``, once all rows are done."""
        deadline = None if timeout is None else Deadline(timeout)
        if self.rebuild.patience_s == math.inf:
            self.await_back(timeout)
        while self._joined is None and self.outstanding:
            if (self.has_failed or not (self.made or self.rebuild.patience_s)) and self.others_serve():
                self.rows.truncate_waiting()
            try:
                if self.done_rows() == self.outstanding:
                    self._joined = self.wait_rows(1, 0)
                    break
            except (*SESSION_ENDS, HubTimeout):
                raise
            except Exception as error:  # of an env; the others are to be done, too
                if (env := env_of(error)) is None:
                    raise
                self._error = self._error or error
                self._taken_on_hub(np.array([env - self.made[0].connection.row_offset]))
                continue
            if deadline is not None and not deadline.left_s():
                self._raise_late()
            time.sleep(DONE_LOOK_S)
        if self._error is not None:
            self._taken_on_hub(np.arange(self.num_envs))
            self.rows.forget(np.arange(self.num_envs))
            raise self._error
        assert self._joined is not None
        self.rows.reported |= self.rows.truncation_pending
        self.taken(np.arange(self.num_envs))
        return self._joined

    def _begun_on_hub(self, timeout: float | None) -> bool:
        """True if what was begun is begun on the hub that has the rows now; False if a step waits no longer for one."""
        if self._unreset is not None or not self.others_serve():
            self.await_back(timeout)
        else:
            patience_s = self.rebuild.patience_s
            if not self.rebuild.wait(patience_s if timeout is None else min(patience_s, timeout)):
                if self.rebuild.patience_s:
                    self._raise_late()
                return False
            if self.has_failed:
                return False  # the other hubs have stepped; the next step raises it before they do
        assert self._begin is not None
        lane = self._hub_lane()
        if self._tried is None:
            self._tried = lane.progress
        if lane.progress == self._tried:  # else it was begun before an interrupt
            self._begin(lane)
        self._begin = self._tried = None
        return True

    def _truncation(self, rows: np.ndarray, into: Sequence[np.ndarray]) -> Batch:
        for array, last in zip(into, self.last_observations(), strict=True):
            array[...] = last[rows]
        loss = self.rebuild.loss
        info = failure_info(EnvFailure("hub_lost", f"{loss}; the env is made again", hub=loss.hub))
        blob = codec.encode_pair(b"", info) if self._has_object_leaves else info
        count = len(rows)
        flags = np.zeros(count), np.zeros(count, bool), np.ones(count, bool)
        return Batch(into, *flags, [(row, blob) for row in rows.tolist()], [], rows)

    @property
    def outstanding(self) -> int:
        return int(self.are_outstanding.sum())

    @property
    def are_outstanding(self) -> np.ndarray:
        here: np.ndarray = self.rows.truncates | self.rows.are_waiting
        return here if self._lane is None else here | self._lane.are_outstanding

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        self.rows.send(env_ids, codes, arrays)

    def _begin_waiting(self) -> None:
        """Begin the rows that wait, once they are on a hub again; errors as for ``Rebuild.parts``."""
        waiting = self.rows.waiting
        if waiting and self.rebuild.over:
            lane = self._hub_lane()
            while waiting:
                env_ids, codes, arrays = waiting[0]
                lane.settle()  # an interrupt may have come before these were noted as begun
                if not (lane.are_outstanding | self.rows.truncation_pending)[env_ids].any():
                    lane.begin_rows(env_ids, codes, arrays)
                waiting.pop(0)

    def _done_on_hub(self, min_envs: int = 1) -> int:
        return self._lane.done_rows(min_envs) if self._lane is not None and self._lane.outstanding else 0

    def done_rows(self, min_envs: int = 1) -> int:
        self._begin_waiting()
        truncates = int(self.rows.truncates.sum())
        return truncates + self._done_on_hub(max(1, min_envs - truncates))

    def descriptors(self) -> Sequence[int]:
        return self._lane.descriptors() if self._lane is not None else ()

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        truncates, batches = np.flatnonzero(self.rows.truncates), []
        if truncates.size:
            batches.append(self._truncation(truncates, [leaf[truncates] for leaf in self.rows.earlier]))
        if self._lane is not None and self._done_on_hub():
            batches.append(self._put_earlier(self._lane.wait_rows(1, timeout)))
        return joined(batches)

    def _put_earlier(self, batch: Batch) -> Batch:
        """The batch of some rows; with earlier observations of those that show nothing on the hub yet."""
        rows, env_ids = self.rows, batch.env_ids
        rows.has_observation[env_ids] = True
        if not rows.no_new_observation[env_ids].any():
            return batch
        assert env_ids is not None
        not_new = rows.no_new_observation[env_ids] & _invalid_rows(batch)
        rows.has_observation[env_ids[not_new]] = False
        observations = [leaf.copy() for leaf in batch.observations]
        for array, leaf in zip(observations, rows.earlier, strict=True):
            array[not_new] = leaf[env_ids[not_new]]
        return batch._replace(observations=observations)

    def taken(self, env_ids: np.ndarray) -> None:
        self._taken_on_hub(env_ids)
        self.rows.truncation_pending[env_ids] = False
        self.rows.forget(env_ids)

    def _taken_on_hub(self, env_ids: np.ndarray) -> None:
        if self._lane is None:
            return
        own = env_ids[self._lane.are_outstanding[env_ids]]
        if own.size:  # the lane last: after an interrupt this is done once more
            self.rows.no_new_observation[own] &= ~self.rows.has_observation[own]
            self._lane.taken(own)
