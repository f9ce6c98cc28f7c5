"""The shared lane: on the hub's machine the client posts in the session's memory and wakes the workers itself.

The hub is off the path of a step, a reset and a call. It supervises the workers, and drives for what does not fit the
arena. An env's exception, a large info and the end of a worker are reported to the hub, which is asked for them over
the wire.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from operator import itemgetter
from typing import Any, NoReturn, cast

import numpy as np

from envhub.arena.layout import Layout
from envhub.arena.memory import (
    CALLS,
    DRIVER_CLIENT,
    OP_CALL,
    OP_OUT_OF_BAND,
    OP_PART,
    OP_RESET,
    OP_SET_ATTR,
    OP_STEP,
    STATUS_RAISED,
    STEPS,
    Arena,
    ArenaDriver,
    StepTimes,
)
from envhub.arena.spin import HAS_FENCE, RING, Spinner
from envhub.errors import EnvRaised, HubLost, HubTimeout, hub_at, of_hub
from envhub.protocol import messages
from envhub.protocol.messages import VIEWED_BYTES, Call, Collect, Op, Reset, SetAttr
from envhub.values.info_columns import Rows
from envhub.values.leaf import Leaf
from envhub_client.connection.connection import CHECK_S
from envhub_client.connection.failures import SESSION_FAILS
from envhub_client.deadline import Deadline, answer_timeout, seconds_text
from envhub_client.lanes.attach import Attachment
from envhub_client.lanes.base import Batch, Decode, InfoGroup, new_batch
from envhub_client.lanes.wire import WireLane

PARK_S = CHECK_S  # at a time: a lost connection is reported while a long step goes on
COPIES_BYTES_MAX = 1 << 26  # of large infos, in memory that is kept

log = logging.getLogger("envhub")


class Begun(Enum):
    """Progress of the reset, step or call that was begun last."""

    BY_HUB = 1  # the hub drives it; its reply comes by the wire lane
    POSTED = 2  # the client drives it; the arena's words are being written, and the workers are not rung yet
    RUNG = 3  # the client drives it; the workers were rung


class SharedLane:
    """Posts in the arena, and without ``copy`` returns its slots; what does not fit there goes by the wire lane."""

    name = "shared"

    def __init__(self, wire: WireLane, attachment: Attachment, arena: Arena, has_object_leaves: bool) -> None:
        """Post in this arena; with ``has_object_leaves`` calls go by the hub, which copies the objects before."""
        self._has_object_leaves = has_object_leaves
        self.num_envs, self.leaves = wire.num_envs, wire.leaves
        self._wire, self._attachment = wire, attachment
        self._connection = connection = wire.connection
        self._bell, *self._bells = attachment.bells
        self._arena = arena
        self._driver = ArenaDriver(arena)
        self._spinner = Spinner(attachment.shared.spin_us, time.perf_counter_ns)
        self._poller = select.epoll()
        # By edges each ring wakes it once, and a read for every ring is saved.
        self._poller.register(self._bell, select.EPOLLIN | select.EPOLLET)
        self._poller.register(attachment.side, select.EPOLLIN)
        self._copies = memoryview(b"")  # of large infos
        self._begun, self._op = Begun.BY_HUB, OP_STEP
        self._times, self._steps, self._posted_ns = StepTimes(arena.step_ns.data), 0, 0  # seen by the hub's operator
        self._called: list[int] = []  # rows of the last call
        self._packed: tuple[object, bytes] = (None, b"")  # the last reset or call, and its encoding
        self._unrung: tuple[np.ndarray, tuple[int, ...]] | None = None  # envs to be posted, and progress before
        self._unreturned = False  # whether a step of all rows was posted and its results were not returned
        self._last: list[np.ndarray] | None = None  # copies of what was returned last, where the slots may not hold it
        connection.on_close.append(self.close)
        connection.on_idle.append(self._let_go_if_revoked)

    def settle(self) -> bool:
        if self._unrung is not None:
            self._ring_rows()
        outstanding = 1 in self._driver.sent
        if not outstanding and not self._arena.quiescent():
            with self._connection.in_use:
                self._regain_drive()
                self._ring(self._bells)
                self._await(None)
        return outstanding

    def breach(self, row: int, what: str) -> NoReturn:
        raise self._connection.breach(what)

    def _encoded(self, message: Reset | Call | SetAttr) -> bytes:
        if message != self._packed[0]:  # programs repeat their requests
            self._packed = message, messages.pack(message)
        return self._packed[1]

    def begin_reset(self, reset: Reset) -> None:
        if not self._post_message(OP_RESET, self._encoded(reset)):
            self._leave_to_hub()
            self._wire.begin_reset(reset)

    def begin_call(self, message: Call | SetAttr) -> None:
        op = OP_CALL if isinstance(message, Call) else OP_SET_ATTR
        if self._has_object_leaves or not self._post_message(op, self._encoded(message), message.rows):
            self._leave_to_hub()
            self._wire.begin_call(message)

    def begin_step(self, codes: bytes, arrays: Sequence[np.ndarray], out_of_band: bytes) -> None:
        if out_of_band:
            if not self._post_message(OP_OUT_OF_BAND, out_of_band, (), codes, arrays):
                self._leave_to_hub()
                self._wire.begin_step(codes, arrays, out_of_band)
            return
        connection = self._connection
        with connection.in_use:
            self._posted_ns = time.monotonic_ns()
            needs_check = self._posted_ns >= connection.check_ns
            if needs_check or connection.protocol.unsettled or not self._arena.client_may_post:
                self._prepare()
            if self._unreturned:
                self._keep_last()
            self._begun, self._op, self._unreturned = Begun.POSTED, OP_STEP, True
            self._driver.post(OP_STEP, codes, arrays)
            self._ring(self._bells)

    def _post_message(
        self,
        op: int,
        message: bytes,
        rows: Sequence[int] = (),
        codes: bytes = b"",
        arrays: Sequence[np.ndarray] = (),
    ) -> bool:
        """Post a request with a message, a call of these rows or of all; False if it does not fit the arena."""
        with self._connection.in_use:
            self._posted_ns = time.monotonic_ns()
            needs_check = self._posted_ns >= self._connection.check_ns
            if needs_check or self._connection.protocol.unsettled or not self._arena.client_may_post:
                self._prepare()
            if not self._arena.put_message(message):
                return False
            if op in CALLS:
                self._begun, self._op = Begun.POSTED, op
                self._called = self._driver.post_call(op, rows)
                self._ring(self._bells_of(self._called))
                return True
            if self._unreturned:
                self._keep_last()
            self._begun, self._op, self._unreturned = Begun.POSTED, op, True
            self._driver.post(op, codes, arrays)
            self._ring(self._bells)
        return True

    def _bells_of(self, rows: Iterable[int]) -> list[int]:
        return [self._bells[worker] for worker in {row % len(self._bells) for row in rows}]

    def _leave_to_hub(self) -> None:
        self._keep_last()
        self._begun = Begun.BY_HUB
        self._driver.forget()

    def _prepare(self) -> None:
        """Be able to begin a step; errors as for ``_regain_drive``, and ``HubLost`` where the hub is shutting down."""
        self._tend()
        self._regain_drive()
        if not self._arena.client_may_post:
            for _ in range(2):  # it ends the session after the first answer, and then says why
                self._ask_hub([], None)
            text = f"{hub_at(self._connection.address)} is shutting down"
            raise of_hub(HubLost(text), self._connection.hub)

    def _regain_drive(self) -> None:
        """Drive, once the hub is done with what was given up and has handed the drive back.

        The hub may not have read yet what was given up, so that the client seems to drive.
        """
        if self._connection.protocol.unsettled or self._arena.driver != DRIVER_CLIENT:
            self._connection.synchronize()
        if self._arena.revoked or self._arena.driver != DRIVER_CLIENT:
            self._fail_as_revoked()

    def _ring(self, bells: Iterable[int]) -> None:
        for bell in bells:
            try:
                os.write(bell, RING)
            except BlockingIOError:
                pass  # it is full, and so wakes its worker in any case
        self._begun = Begun.RUNG

    @property
    def outstanding(self) -> int:
        return self._driver.sent.count(1)

    @property
    def are_outstanding(self) -> np.ndarray:
        return np.frombuffer(self._driver.sent, np.bool_)

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        with self._connection.in_use:
            self._ring_rows()
            self._prepare()
            if self._unreturned:
                self._keep_last()
            self._unrung = env_ids, self.progress
            self._begun, self._op = Begun.POSTED, OP_PART
            self._driver.post_rows(env_ids, codes, arrays)
            self._ring_rows()

    def _ring_rows(self) -> None:
        # An interrupt came between the words and the rings, if anything is left to be done.
        if self._unrung is None:
            return
        env_ids, before = self._unrung
        if self.progress != before:
            self._driver.mark_sent(env_ids)
            self._ring(self._bells_of(env_ids.tolist()))
        self._unrung = None

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        driver, deadline = self._driver, None if timeout is None else Deadline(timeout)
        try:
            with self._connection.in_use:
                self._await(deadline, lambda: driver.done() >= min_envs)
                env_ids, raised = driver.ready()
                if raised is not None:
                    self._ask_hub([raised], deadline)
                small, large = driver.infos(env_ids)
                rows, columns = self._with_large([*small.items()], self._arena.columns(env_ids), large, deadline)
                return Batch(*driver.results(env_ids), rows, self._wire.templates.read(columns, deadline), env_ids)
        except SESSION_FAILS as error:
            error.env_ids = np.flatnonzero(self.are_outstanding).tolist()
            raise

    def done_rows(self, min_envs: int = 1) -> int:
        with self._connection.in_use:
            events = self._poller.poll(0)  # before the words: a ring after this wakes the next wait
            self._check_hub(events, None)
            return self._driver.done()

    def descriptors(self) -> Sequence[int]:
        return (self._poller.fileno(),)

    def last_observations(self) -> list[np.ndarray]:
        if self._last is not None:
            return [*map(np.ndarray.copy, self._last)]
        arena, rows = self._arena, np.arange(self.num_envs)
        # A row goes from one slot to the other with each request.
        slots = (arena.request & 1) ^ (self._unreturned | np.frombuffer(self._driver.sent, np.bool_))
        return [leaf[slots, rows] for leaf in arena.observations]

    def _keep_last(self) -> None:
        """Copy what was returned last, before a request that may overwrite it or whose results may not be returned."""
        if self._wire.keeps_last and self._last is None:
            self._last = self.last_observations()

    def taken(self, env_ids: np.ndarray) -> None:
        arena = self._arena
        is_new = (arena.status[env_ids] != STATUS_RAISED) & (arena.done[env_ids] == arena.request[env_ids])
        new = env_ids[is_new]
        if len(new) < len(env_ids):
            self._keep_last()
        if self._last is not None:
            slots = arena.done[new] & 1
            for last, leaf in zip(self._last, arena.observations, strict=True):
                last[new] = leaf[slots, new]
        self._driver.taken(env_ids)

    @property
    def progress(self) -> tuple[int, ...]:
        return int(np.add.reduce(self._arena.request)), self._connection.protocol.last_seq

    def wait(self, timeout: float | None, into: Sequence[np.ndarray] | None = None) -> Batch:
        if self._begun is Begun.BY_HUB:
            batch = self._wire.wait(timeout, into)
            self._last, self._unreturned = None, False
            return batch
        with self._connection.in_use:
            deadline = None if timeout is None else Deadline(timeout)
            self._await(deadline)
            arena, driver = self._arena, self._driver
            rows, groups = self._infos(deadline) if arena.has_infos() else ([], [])
            observations: Sequence[np.ndarray] = driver.observations()
            if into is not None:
                for array, leaf in zip(into, observations, strict=True):
                    array[...] = leaf  # without the Python call that ``np.copyto`` is
                observations = into
            elif self._wire.copy and not driver.mixed:
                observations = [*map(np.ndarray.copy, observations)]
            self._last, self._unreturned = None, False
            if self._op == OP_RESET:
                return Batch(observations, None, None, None, rows, groups)
            results = arena.rewards.copy(), arena.terminations.copy(), arena.truncations.copy()
            self._steps += 1
            if self._steps >= self._times.next_step:
                self._times.keep(self._steps, time.monotonic_ns() - self._posted_ns)
            return new_batch((observations, *results, rows, groups, None))

    def wait_call(self, timeout: float | None, decode: Decode) -> dict[int, Any]:
        if self._begun is Begun.BY_HUB:
            return self._wire.wait_call(timeout, decode)
        with self._connection.in_use:  # the hub has the memory taken away only when this is not in use
            deadline, arena = None if timeout is None else Deadline(timeout), self._arena
            self._await(deadline)
            blobs = {row: arena.result(row) for row in self._called}
            if missing := [row for row, blob in blobs.items() if blob is None]:
                blobs.update(self._ask_hub(missing, deadline))
            return {row: decode(blob or b"") for row, blob in blobs.items()}

    def _infos(self, deadline: Deadline | None) -> tuple[list[tuple[int, bytes]], list[InfoGroup]]:
        """The infos of a step; the hub is asked for the large ones, and for what an env raised."""
        arena = self._arena
        small, columns = arena.all_infos()
        rows = self._copied(small)
        if large := arena.sent_by_channel():
            rows, columns = self._with_large(rows, columns, large, deadline)
        return rows, self._wire.templates.read(columns, deadline)

    def _with_large(
        self, rows: list[tuple[int, bytes]], columns: list[Rows], large: list[int], deadline: Deadline | None
    ) -> tuple[list[tuple[int, bytes]], list[Rows]]:
        """The infos by row, ascending, and those in columns, with the ``large`` ones that the hub is asked for."""
        templates = self._arena.info_template.tolist()
        for row, blob in self._ask_hub(large, deadline) if large else ():
            if templates[row] > 0:  # they are in a place that this process has not mapped
                columns.append(Rows(templates[row], np.array([row]), np.frombuffer(blob, np.uint8)[np.newaxis]))
            else:
                rows.append((row, blob))
        return sorted(rows, key=itemgetter(0)), columns

    def _copied(self, infos: Sequence[tuple[int, memoryview]]) -> list[tuple[int, bytes]]:
        """Copies of these infos; large ones are in memory that the next step uses again, for new memory is slow."""
        wanted, at = sum(len(blob) for _, blob in infos if len(blob) >= VIEWED_BYTES), 0
        if len(self._copies) < wanted <= COPIES_BYTES_MAX:
            self._copies = memoryview(bytearray(min(2 * wanted, COPIES_BYTES_MAX)))
        copies = []
        for row, blob in infos:
            end = at + len(blob)
            if len(blob) < VIEWED_BYTES or wanted > COPIES_BYTES_MAX:
                copies.append((row, bytes(blob)))
                continue
            self._copies[at:end] = blob
            copies.append((row, cast(bytes, self._copies[at:end])))
            at = end
        return copies

    def _ask_hub(self, rows: list[int], deadline: Deadline | None) -> list[tuple[int, bytes]]:
        """The infos of these rows that the hub holds, or the error of one of these envs."""
        reply = self._connection.ask(Op.COLLECT, Collect(rows), timeout=answer_timeout(deadline))
        if raised := [row for row in rows if self._arena.status[row] == STATUS_RAISED]:
            cause = EnvRaised(self._connection.row_offset + raised[0], "Exception", "not reported")
            raise self._connection.breach(f"envs {raised} raised, and it did not report what") from cause
        try:
            return messages.unpack_rows(b"".join(reply.frames), self._arena.layout.rows)
        except ValueError as error:
            raise self._connection.breach(f"a reply to COLLECT cannot be read: {error}") from error

    def _await(self, deadline: Deadline | None, ready: Callable[[], bool] | None = None) -> None:
        """Wait until every row is done, or as many as make it ``ready``, at most until ``deadline``."""
        ready = ready or self._arena.quiescent
        if self._begun is Begun.POSTED:
            self._ring(self._bells)
        if not self._spinner.spin(ready):
            while True:
                left_s = PARK_S if deadline is None else deadline.left_s()
                events = self._poller.poll(min(left_s, PARK_S))
                if ready():
                    break
                self._check_hub(events, deadline)
                if deadline is not None and not left_s:
                    verb = "step" if self._op in STEPS else "reset" if self._op == OP_RESET else "call"
                    late = f"the envs did not finish their {verb} within {seconds_text(deadline.timeout)} s"
                    text = f"{late}; it can be waited for again"
                    raise of_hub(HubTimeout(text), self._connection.hub)
        if not HAS_FENCE:
            self._poller.poll(0)  # without a fence, a system call has to come before what a word guards is read

    def _check_hub(self, events: list[tuple[int, int]], deadline: Deadline | None) -> None:
        if self._arena.revoked:
            self._fail_as_revoked(deadline)
        if any(descriptor != self._bell for descriptor, _ in events):
            self._connection.lose("its side socket has ended")
        self._tend()

    def _tend(self) -> None:
        if time.monotonic_ns() >= self._connection.check_ns:
            self._connection.check()

    def _let_go_if_revoked(self) -> None:
        """Let go of the memory if the hub wants that; this lane goes on with a copy, in which it is revoked, too."""
        if self._arena is not None and self._arena.revoked:
            with contextlib.suppress(OSError):  # no memory now
                self._attachment.let_go()
                self._arena.revoke()  # the hub may have taken that back

    def close(self) -> None:
        self._poller.close()
        self._arena = self._driver = self._times = None  # type: ignore[assignment]

    def _fail_as_revoked(self, deadline: Deadline | None = None) -> NoReturn:
        self._let_go_if_revoked()
        self._ask_hub([], deadline)
        text = f"{hub_at(self._connection.address)} has ended this session"
        raise of_hub(HubLost(text), self._connection.hub)


def shared_lane(wire: WireLane, ticket: bytes, actions: Sequence[Leaf], has_object_leaves: bool) -> SharedLane | None:
    """The shared lane to the session that the ticket is of; None where the hub grants none."""
    attachment, connection = Attachment(), wire.connection
    connection.on_close.append(attachment.close)
    try:
        attachment.open(connection.local_sockets, ticket)
        layout = Layout(wire.num_envs, tuple(wire.leaves), tuple(actions), attachment.shared.info_bytes)
        return SharedLane(wire, attachment, attachment.arena(layout), has_object_leaves)
    except (OSError, ValueError) as error:
        log.debug("no shared lane to %s: %s", hub_at(connection.address), error)
        attachment.close()
        return None
