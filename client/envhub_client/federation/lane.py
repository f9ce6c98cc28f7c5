"""The lane of a session over several hubs: their batches, as one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar

import numpy as np

from envhub.errors import AccessDenied, EnvHubError, HubTimeout, RemoteProtocolError
from envhub.protocol.messages import Reset
from envhub.values import codec
from envhub_client.connection.connection import Connection
from envhub_client.connection.failures import SESSION_ENDS
from envhub_client.connection.zeromq_transport import READABLE, new_waiter
from envhub_client.deadline import Deadline, seconds_text
from envhub_client.federation.joint_request import JointRequest
from envhub_client.federation.lost_part import LostPart, Step
from envhub_client.federation.part import (
    LOOK_S,
    SILENCE_S_MIN,
    HubPart,
    out_of_band_of,
    reset_of,
    while_in_reach,
)
from envhub_client.federation.rebuild import PartRebuilder
from envhub_client.lanes.base import Batch, Lane, checked_item_sizes, joined, new_batch

PARK_S = 0.1  # at a time in a wait for some envs: connections are kept up, and returns of lost rows seen, meanwhile
Result = TypeVar("Result")
_RESULTS = attrgetter("rewards", "terminations", "truncations")  # of a batch


class FederatedLane:
    """A ``Lane`` of several parts, or of one part to make again; without ``copy`` two sets of buffers alternate."""

    def __init__(
        self, parts: Sequence[HubPart], has_object_leaves: bool, copy: bool, recovery: PartRebuilder | None = None
    ) -> None:
        """``recovery`` makes the rows again whose session is over; without it that error is raised."""
        self.parts = [*parts]  # ascending
        self.num_envs, self.leaves = parts[-1].rows.stop, parts[0].lane.leaves
        self._has_object_leaves = has_object_leaves
        self._recovery = recovery
        # Seconds for which a hub may be silent before its envs are made again; None where no other rows wait for them.
        waited_for = recovery is not None and not recovery.is_only_hub
        self._silence_s_max = max(recovery.patience_s, SILENCE_S_MIN) if recovery and waited_for else None
        self._buffers = None if copy else [self._new_arrays() for _ in range(2)]
        self._buffer_index = 0
        self._request: JointRequest[Batch] = JointRequest(self.lost, _dropped, _connections)
        self._resets = False  # whether the request is a reset
        self._reset: Reset | None = None  # that is to be begun, once all of its rows are on a hub
        self._left_out: list[HubPart] = []  # by the mask of the reset under way
        self._into: Sequence[np.ndarray] | None = None  # for the observations that are waited for
        self._check_s = 0.0  # when to look next whether a hub is out of reach, in a wait for some envs
        self._unsent: Sequence[tuple[HubPart, Step]] = ()  # rows of the last ``begin_rows``
        self._sent_bytes = bytearray(self.num_envs)
        self._sent = np.frombuffer(self._sent_bytes, np.bool_)  # quicker for parts, and that for each step
        self._item_sizes: list[int] = []  # of the actions of the outstanding envs
        self._has_lost = False  # whether the session of some part was over, and may be so still
        self._objects = [b""] * self.num_envs  # the last observations of no fixed size that came, encoded
        self._rows_read: Sequence[tuple[int, bytes]] = ()  # by the last ``wait_rows``

    def _new_arrays(self) -> list[np.ndarray]:
        return [np.empty((self.num_envs, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    @property
    def name(self) -> str:
        return "+".join(sorted({part.lane.name for part in self.hub_parts()}))

    def hub_parts(self) -> list[HubPart]:
        """The parts with the sessions that have their rows now, or had them last."""
        return [each for part in self.parts for each in _hub_parts(part) or [part]]

    @property
    def progress(self) -> tuple[int, ...]:
        return tuple(number for part in self.parts for number in part.lane.progress)

    def settle(self) -> bool:
        self._request.settle()
        if self._unsent:
            self._send_rest()
        return 1 in self._sent_bytes

    def give_up(self) -> None:
        self._reset = None
        self._request.give_up()

    def breach(self, row: int, what: str) -> None:
        part = next(each for each in self.parts if row in each.rows)
        try:
            part.lane.breach(row - part.rows.start, what)
        except RemoteProtocolError as error:
            if self._recovery is None:
                raise
            if self.outstanding:
                self.lost(part, error)
            else:
                self._request.retract(part, error)

    def last_observations(self) -> list[np.ndarray]:
        return [
            np.concatenate(leaf) for leaf in zip(*(part.lane.last_observations() for part in self.parts), strict=True)
        ]

    def put_earlier(self, observations: Sequence[np.ndarray]) -> None:
        """Put the last observations of rows that have none on the hub that has them now into these of all rows."""
        for part in self.parts:
            if isinstance(part.lane, LostPart):
                part.lane.rows.show_earlier([*map(part.take, observations)])

    def lost(self, part: HubPart, loss: EnvHubError) -> None:
        """Go on without the session of this part, or raise this loss: its rows are truncated, and made again."""
        part = next(each for each in self.parts if part.rows.start in each.rows)
        recovery = self._recovery
        if recovery is None or (recovery.is_only_hub and isinstance(loss, AccessDenied)):
            self._has_lost = True
            loss.env_ids = (part.rows.start + np.flatnonzero(part.take(self._sent))).tolist()
            raise loss
        if isinstance(part.lane, LostPart) and not part.lane.made:  # no hub has made the rows again in time
            waiting = np.flatnonzero(
                part.lane.rows.are_waiting
            )  # which are not waited for any more, once the caller knows
            loss.env_ids = (part.rows.start + waiting).tolist() if self.outstanding else ()
            raise loss
        self._has_lost = True
        rebuild = recovery.rebuild(part, _hub_parts(part), loss)
        workers = recovery.workers_of(part)
        lane = LostPart(part.lane, part.take(self._sent), self._has_object_leaves, rebuild, self._lane_of, workers)
        part.lane, lane.others_serve = lane, self._serves
        rebuild.wait(0)  # from here on the envs are made again: after an interrupt before, this is done once more

    def _lane_of(self, parts: Sequence[HubPart]) -> Lane:
        return parts[0].lane if len(parts) == 1 else FederatedLane(parts, self._has_object_leaves, copy=True)

    def _serves(self) -> bool:
        return any(not isinstance(part.lane, LostPart) or part.lane.made for part in self.parts)

    def present_parts(self, rows: Sequence[int] = (), timeout: float | None = None) -> list[HubPart]:
        """The parts with these rows, or all, once they are on a hub; errors as for ``LostPart.await_back``."""
        deadline = None if timeout is None else Deadline(timeout)
        wanted = [part for part in self.parts if not rows or any(row in part.rows for row in rows)]
        for part in wanted:
            if isinstance(part.lane, LostPart):
                part.lane.await_back(None if deadline is None else deadline.left_s())
        return [each for part in wanted for each in _hub_parts(part)]

    def is_present(self, connection: Connection) -> bool:
        return any(each.connection is connection for part in self.parts for each in _hub_parts(part))

    def _replace_or_raise(self, wanted: Callable[[HubPart], object] = lambda part: True) -> None:
        """Replace lost parts before a request to the ``wanted`` ones, or raise once why these are on no hub."""
        self._replace_lost()
        for part in filter(wanted, self.parts):
            if self._recovery is None:
                part.connection.check()
            elif isinstance(part.lane, LostPart) and part.lane.has_failed:
                part.lane.rebuild.parts()

    def _replace_lost(self) -> None:
        """Put the parts that are on a hub again in the place of those that were lost."""
        parts: list[HubPart] = []
        for part in self.parts:
            if isinstance(part.lane, LostPart) and part.lane.rebuild.over:
                self._of_rows(part, lambda part: part.lane.settle())
            parts += part.lane.successors(part) if isinstance(part.lane, LostPart) else [part]
        self.parts = parts
        self._has_lost = self._recovery is None or any(isinstance(part.lane, LostPart) for part in parts)

    def begin_reset(self, reset: Reset) -> None:
        if self._has_lost:
            self._replace_or_raise(lambda part: reset_of(reset, part.rows))
        self._buffer_index, self._into, self._resets, self._reset = 1 - self._buffer_index, None, True, reset
        self._request.begin([], _dropped, self._await)  # what was asked before is over
        with contextlib.suppress(HubTimeout):
            self._begin_reset(0.0)

    def _begin_reset(self, timeout: float | None) -> None:
        reset = self._reset
        if reset is None or self._request.is_pending:  # an interrupt may have come after it was begun
            return
        if self._has_lost and self._recovery is not None:
            if not reset.snapshot:  # which no hub has that makes rows again
                self.present_parts([row for row, chosen in enumerate(reset.mask) if chosen], timeout)
            self._replace_lost()
        resets = [reset_of(reset, part.rows) for part in self.parts]
        wanted = {part: each for part, each in zip(self.parts, resets, strict=True) if each is not None}
        self._left_out = [part for part in self.parts if part not in wanted]
        self._request.begin([*wanted], lambda part: part.lane.begin_reset(wanted[part]), self._await)
        self._reset = None

    def begin_step(self, codes: bytes, arrays: Sequence[np.ndarray], out_of_band: bytes) -> None:
        if self._has_lost:
            self._replace_or_raise()
        self._buffer_index, self._into, self._resets, self._reset = 1 - self._buffer_index, None, False, None
        packed: dict[HubPart, bytes] = {}
        if out_of_band:
            of_each = out_of_band_of(out_of_band, [part.rows for part in self.parts])
            packed = dict(zip(self.parts, of_each, strict=True))

        def send(part: HubPart) -> None:
            part.lane.begin_step(codes, [*map(part.take, arrays)], packed.get(part, b""))

        self._request.begin([*self.parts], send, self._await)

    def _await(self, part: HubPart, timeout: float | None) -> Batch:
        into = [*map(part.take, self._into or self._observations())]  # each hub's part of each step comes here
        if self._silence_s_max is None:
            batch = part.lane.wait(timeout, into)
        else:
            batch = self.while_in_reach(part, timeout, lambda left_s: part.lane.wait(left_s, into))
        if batch.rows or batch.groups:
            batch = part.numbered(batch)
        if self._has_object_leaves:
            batch = self._with_objects(part, batch)
            self._keep_objects(batch.rows)
        return batch

    def _with_objects(self, part: HubPart, batch: Batch) -> Batch:
        """The batch of a part; with earlier observations of no fixed size where a row repeats what it showed last."""
        rows = []
        try:
            for row, blob in batch.rows:
                objects, info = codec.decode_pair(blob)
                rows.append((row, blob if len(objects) else codec.encode_pair(self._objects[row], bytes(info))))
            if len(rows) != len(part.rows if batch.env_ids is None else batch.env_ids):
                raise ValueError(f"observations of no fixed size of {len(rows)} envs")
        except ValueError as error:
            part.lane.breach(0, f"a reply does not fit the session: {error}")
        return batch._replace(rows=rows)

    def _keep_objects(self, rows: Sequence[tuple[int, bytes]]) -> None:
        for row, blob in rows:
            self._objects[row] = bytes(codec.decode_pair(blob)[0])

    def _observations(self) -> Sequence[np.ndarray]:
        if self._into is None:
            self._into = self._new_arrays() if self._buffers is None else self._buffers[self._buffer_index]
        return self._into

    def while_in_reach(self, part: HubPart, timeout: float | None, wait: Callable[[float | None], Result]) -> Result:
        """Wait by ``wait`` until a hub of this part is out of reach for longer than envs of other hubs wait for it."""
        if self._silence_s_max is None:
            return wait(timeout)
        return while_in_reach(lambda: _connections(part), self._silence_s_max, timeout, wait)

    def _check_reach(self, part: HubPart) -> None:
        if self._silence_s_max is not None:
            for connection in _connections(part):
                connection.check_reach(self._silence_s_max)

    def wait(self, timeout: float | None, into: Sequence[np.ndarray] | None = None) -> Batch:
        if into is not None:
            self._into = into
        observations = self._observations()
        if self._reset is not None:
            deadline = None if timeout is None else Deadline(timeout)
            self._begin_reset(timeout)
            timeout = None if deadline is None else deadline.left_s()
        batches = self._request.results(timeout)
        if len(batches) == 1 and not self._resets:
            return batches[0]._replace(observations=observations)
        rows = [row for batch in batches for row in batch.rows]
        groups = [group for batch in batches for group in batch.groups]
        if self._resets:
            rows = sorted([*rows, *self._last_ones()])
            return Batch(observations, None, None, None, rows, groups)
        rewards, terminations, truncations = zip(*map(_RESULTS, batches), strict=True)
        results = np.concatenate(rewards), np.concatenate(terminations), np.concatenate(truncations)
        return new_batch((observations, *results, rows, groups, None))

    def _last_ones(self) -> list[tuple[int, bytes]]:
        """Last observations of the rows that the reset leaves out, and the rows that have some of no fixed size."""
        rows: list[int] = []
        for part in self._left_out:
            for array, last in zip(self._observations(), part.lane.last_observations(), strict=True):
                part.take(array)[...] = last
            rows += part.rows if self._has_object_leaves else ()
        return [(row, codec.encode_pair(self._objects[row], b"")) for row in rows]

    @property
    def outstanding(self) -> int:
        return self._sent_bytes.count(1)

    @property
    def are_outstanding(self) -> np.ndarray:
        return self._sent

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        self._item_sizes = checked_item_sizes(self._sent, env_ids, arrays, self._item_sizes)
        if self._has_lost:
            self._replace_lost()
        self._unsent = [
            (part, (env_ids[positions] - part.rows.start, codes, [array[positions] for array in arrays]))
            for part in self.parts
            if (positions := part.positions(env_ids)).size
        ]
        self._send_rest()

    def _send_rest(self) -> None:
        """Send each hub its rows, unless that was done before an interrupt; one that refuses keeps none from others."""
        refusal: Exception | None = None
        while self._unsent:
            part, rows = self._unsent[0]
            self._of_rows(part, lambda part: part.lane.settle())
            if not part.lane.are_outstanding[rows[0]].any():
                try:
                    self._of_rows(part, lambda part, rows=rows: part.lane.begin_rows(*rows))  # type: ignore[misc]
                except ValueError as error:
                    refusal = refusal or error
            part.take(self._sent)[rows[0]] = part.lane.are_outstanding[rows[0]]
            self._unsent = self._unsent[1:]
        if refusal is not None:
            raise refusal

    def _outstanding_parts(self) -> list[HubPart]:
        return [part for part in self.parts if part.take(self._sent).any()]

    def done_rows(self, min_envs: int = 1) -> int:
        left_to_others = self.outstanding - min_envs  # at most

        def done(part: HubPart) -> int:
            return part.lane.done_rows(max(1, part.lane.outstanding - left_to_others))

        return sum(self._of_rows(part, done) for part in self._outstanding_parts())

    def descriptors(self) -> Sequence[int]:
        return [each for part in self._outstanding_parts() for each in part.lane.descriptors()]

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        deadline, done = None if timeout is None else Deadline(timeout), 0
        while True:
            left_s = PARK_S if deadline is None else min(PARK_S, deadline.left_s())
            before, done = done, self.done_rows(min_envs)
            if done >= min_envs:
                break
            if deadline is not None and not left_s:
                raise HubTimeout(
                    f"{done} of {min_envs} envs were done within {seconds_text(deadline.timeout)} s; receive again"
                )
            if done > before:  # hubs that have answered are to be asked again first
                continue
            _park(self.descriptors(), left_s)
            if time.monotonic() >= self._check_s:
                self._check_s = time.monotonic() + LOOK_S
                for part in self._outstanding_parts():
                    self._of_rows(part, self._check_reach)
        batches = [self._of_rows(part, self._received) for part in self._outstanding_parts()]
        whole = joined([batch for batch in batches if batch is not None])
        self._rows_read = whole.rows
        return whole

    def _received(self, part: HubPart) -> Batch | None:
        if not (done := part.lane.done_rows()):
            return None
        batch = part.numbered(part.lane.wait_rows(done, 0))
        return self._with_objects(part, batch) if self._has_object_leaves else batch

    def _of_rows(self, part: HubPart, get: Callable[[HubPart], Result]) -> Result:
        """Get this of the part, or of what takes its place."""
        try:
            return get(part)
        except SESSION_ENDS as loss:
            self.lost(part, loss)
            return get(part)
        except EnvHubError as error:  # such as of a session that has failed
            error.env_ids = [part.rows.start + row for row in error.env_ids]
            raise

    def taken(self, env_ids: np.ndarray) -> None:
        if self._has_object_leaves:
            self._keep_objects(self._rows_read)
            self._rows_read = ()
        self._sent[env_ids] = False
        for part in self.parts:
            if (positions := part.positions(env_ids)).size:
                part.lane.taken(env_ids[positions] - part.rows.start)


def _hub_parts(part: HubPart) -> list[HubPart]:
    """This part, or those that have its rows since its hub was lost; none as long as they are on no hub."""
    lane = part.lane
    return [each.moved(part.rows.start) for each in lane.made] if isinstance(lane, LostPart) else [part]


def _connections(part: HubPart) -> list[Connection]:
    return [each.connection for each in _hub_parts(part)]


def _dropped(part: HubPart) -> None:
    """Have the part report again what was in a result that does not reach the caller."""
    if isinstance(part.lane, LostPart):
        part.lane.give_up()


def _park(descriptors: Sequence[int], seconds: float) -> None:
    """Wait until one of these descriptors is readable, at most ``seconds``."""
    if not descriptors:
        time.sleep(seconds)
        return
    with contextlib.closing(new_waiter()) as waiter:
        for descriptor in descriptors:
            waiter.register(descriptor, READABLE)
        waiter.poll(seconds)
