"""The wire lane: one request and one reply per step, over ZeroMQ."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np

from envhub.errors import HubTimeout, RequestRefused
from envhub.protocol import messages
from envhub.protocol.client import Reply
from envhub.protocol.messages import Failure, Op, Receive, Reset, Send, Step, TemplatesRequest
from envhub.protocol.prelude import Frame
from envhub.values import codec
from envhub.values.actions import split_results
from envhub.values.compression import decompressor
from envhub.values.info_columns import NotInColumns, Rows, Template, unpack_columns
from envhub.values.leaf import Leaf
from envhub_client.connection.connection import Connection
from envhub_client.connection.failures import SESSION_FAILS
from envhub_client.deadline import Deadline, answer_timeout
from envhub_client.lanes.base import Batch, InfoGroup, joined

# Up to here, copying a received frame costs less than keeping alive the whole receive buffer that it is part of.
KEEP_BYTES = 1 << 16
TEMPLATES_MAX = 4096  # forms of infos; beyond that all are forgotten, and those in use are asked for again

_Field = tuple[np.dtype[Any], tuple[int, ...], int]  # dtype, shape and size in bytes of a batch of a leaf


class _Inbox(NamedTuple):
    """Results that arrived and were not returned; replaced as a whole, as no interrupt must come between its fields."""

    parts: tuple[Batch, ...] = ()  # results of some envs, which came before there were enough
    unread: Reply | None = None  # a reply that is being read, for which the hub may have to be asked for more
    read: Reply | None = None  # the last reply of which a part was made


_EMPTY = _Inbox()


class WireLane:
    """Requests and replies over a connection; without ``copy`` two sets of buffers for observations alternate."""

    name = "wire"

    def __init__(
        self,
        connection: Connection,
        templates: InfoTemplates,
        num_envs: int,
        leaves: Sequence[Leaf],
        copy: bool,
        compression: str = "",
        keeps_last: bool = False,
    ) -> None:
        self.num_envs = num_envs
        self.leaves = leaves
        self.copy = copy
        self._connection = connection
        self._fields = _fields(leaves, num_envs)
        zeros = [(shape, dtype) for dtype, shape, _ in self._fields]
        self._buffers = None if copy else [[np.zeros(*wanted) for wanted in zeros] for _ in range(2)]
        self._turn = 0
        self._step = Step(b"")  # the last one's codes, which mostly are the next one's, too
        self._sent_bytes = bytearray(num_envs)
        self._sent = np.frombuffer(self._sent_bytes, np.bool_)  # quicker for parts, and that for each step
        self._into: Sequence[np.ndarray] | None = None  # arrays for the observations that are waited for
        # Envs of a SEND that may have no reply yet, or may not have been sent, and progress before it.
        self._unconfirmed: tuple[np.ndarray, tuple[int, ...]] | None = None
        self._inbox = _EMPTY
        self._templates = templates
        self._decompress = decompressor(compression) if compression else None
        self.keeps_last = keeps_last
        self._last: list[np.ndarray] | None = None  # of each leaf, as they came; None before the first ones

    def settle(self) -> bool:
        return 1 in self._sent_bytes

    def give_up(self) -> None:
        self._unconfirmed = None
        self._connection.give_up()

    def breach(self, row: int, what: str) -> NoReturn:
        raise self._connection.breach(what)

    def begin_reset(self, reset: Reset) -> None:
        self._inbox, self._turn = _EMPTY, 1 - self._turn
        self._connection.send(Op.RESET, reset, keep=True)

    def begin_step(self, codes: bytes, arrays: Sequence[np.ndarray], out_of_band: bytes) -> None:
        self._inbox, self._turn = _EMPTY, 1 - self._turn
        if codes != self._step.codes:
            self._step = Step(codes)
        frames = [*map(np.ndarray.tobytes, arrays)]
        self._connection.send(Op.STEP, self._step, [*frames, out_of_band] if out_of_band else frames, keep=True)

    @property
    def progress(self) -> tuple[int, ...]:
        return (self._connection.protocol.last_seq,)

    @property
    def outstanding(self) -> int:
        return self._sent_bytes.count(1)

    @property
    def are_outstanding(self) -> np.ndarray:
        return self._sent

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        with self._connection.in_use:  # the reply to a RECEIVE must not come between the look at it and its end
            self.confirm_rows(None)
            ends_receive = self._ends_receive()
            if self._sent[env_ids].any():
                raise ValueError(f"envs {env_ids[self._sent[env_ids]].tolist()} are under way; receive them first")
            if not self._sent.any():
                self._inbox = _Inbox((), None, self._inbox.read)
            send, frames = Send(env_ids.tolist(), codes, ends_receive), [array.tobytes() for array in arrays]
            # Before it is known: at an interrupt, they may be under way.
            self._unconfirmed = env_ids, self.progress
            self._sent[env_ids] = True
            with self._sent_unless_refused(env_ids):
                self._connection.send(Op.SEND, send, frames, keep=True)

    @contextmanager
    def _sent_unless_refused(self, env_ids: np.ndarray) -> Iterator[None]:
        """Note that these envs were not sent, if the block raises another error than an interrupt or a timeout."""
        try:
            yield
        except HubTimeout:
            raise
        except Exception as error:
            self._sent[env_ids] = False
            self._unconfirmed = None
            if isinstance(error, RequestRefused):
                raise ValueError(str(error)) from error
            raise

    def _ends_receive(self) -> bool:
        """True if the next SEND must end a RECEIVE that is pending; a reply that has come is kept."""
        protocol = self._connection.protocol
        if self._has_reply(Op.RECEIVE) and protocol.answer is not self._inbox.read:
            self._inbox = self._inbox._replace(unread=protocol.answer)
        return protocol.pending is Op.RECEIVE

    def _has_reply(self, op: Op) -> bool:
        answer = self._connection.protocol.answer
        return answer is not None and answer.op is op

    def confirm_rows(self, timeout: float | None) -> None:
        if self._unconfirmed is None:
            return
        env_ids, before = self._unconfirmed
        with self._sent_unless_refused(env_ids):
            if self.progress == before:  # the interrupt came before it was begun
                self._sent[env_ids] = False
                self._unconfirmed = None
                return
            reply = self._connection.wait(timeout)
            received = reply.received
            # A RECEIVE is refused where no env is under way: it has no rows.
            if received is not None and getattr(received.message, "code", "") != "refused":
                self._inbox = self._inbox._replace(unread=received)
            if isinstance(reply.message, Failure):
                self._connection.fail(reply.message)
            self._unconfirmed = None

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        try:
            return self._wait_rows(min_envs, timeout)
        except SESSION_FAILS as error:
            error.env_ids = np.flatnonzero(self._sent).tolist()
            raise

    def _wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        deadline = None if timeout is None else Deadline(timeout)
        self.confirm_rows(timeout)
        # A wait that may time out asks for less at a time: the next may want less.
        while (missing := min_envs - sum(map(_size, self._inbox.parts))) > 0 or self._inbox.unread is not None:
            if not self._receiving():
                self._connection.send(Op.RECEIVE, Receive(missing if timeout is None else 1), keep=True)
            try:
                self._take_part(None if deadline is None else deadline.left_s())
            except HubTimeout:
                if missing > 0:
                    raise
                break  # there are enough; what has come besides is not read yet, as it has infos of an unknown form
            except RequestRefused:  # see ``_part``
                if not self._inbox.parts:
                    raise
                break
        return joined(self._inbox.parts)

    def _take_part(self, timeout: float | None) -> None:
        part = self._read(timeout, self._part)
        self._inbox = _Inbox((*self._inbox.parts, part), None, self._inbox.unread)

    def ask_rows(self) -> None:
        try:
            self.confirm_rows(0)
        except HubTimeout:
            return
        if self.outstanding > sum(map(_size, self._inbox.parts)) and not self._receiving():
            self._connection.send(Op.RECEIVE, Receive(1), keep=True)

    def done_rows(self) -> int:
        if self._receiving():
            with contextlib.suppress(HubTimeout):
                self._take_part(0)
        return sum(map(_size, self._inbox.parts))

    def descriptors(self) -> Sequence[int]:
        return self._connection.descriptors

    def _receiving(self) -> bool:
        """True if an earlier wait, which timed out or was interrupted, has asked already."""
        protocol, inbox = self._connection.protocol, self._inbox
        arrived = self._has_reply(Op.RECEIVE) and protocol.answer is not inbox.read
        return arrived or inbox.unread is not None or protocol.pending is Op.RECEIVE

    def taken(self, env_ids: np.ndarray) -> None:
        parts, unread, read = self._inbox
        left = self._sent.copy()
        left[env_ids] = False
        if self.keeps_last:
            for part in parts:
                if not left[part.env_ids].any():
                    self._keep_rows(part)
        parts = tuple(each for each in parts if left[each.env_ids].any())
        is_error = unread is None or isinstance(unread.message, Failure)  # other replies have results of other envs
        self._inbox = _Inbox(parts, None, unread or read) if is_error else _Inbox(parts, unread, read)
        self._sent[env_ids] = False  # last: a lane of a lost hub's rows repeats this for rows that are outstanding

    def _read(self, timeout: float | None, read: Callable[[Reply, Deadline | None], Batch]) -> Batch:
        """Read the reply by ``read``; it can be read again until the next request."""
        parts, unread, last = self._inbox
        deadline = None if timeout is None else Deadline(timeout)
        reply = unread or self._connection.wait(timeout)
        self._inbox = _Inbox(parts, reply, last)
        try:
            return read(reply, deadline)
        except HubTimeout:
            raise
        except Exception as error:
            if getattr(reply.message, "env_index", None) is None:  # an env's is read again until the env is ``taken``
                self._inbox = _Inbox(parts, None, reply)
            if isinstance(error, ValueError) and not isinstance(reply.message, Failure):
                raise self._connection.breach(f"a {reply.op.name} reply does not fit the session: {error}") from error
            raise

    def _infos(
        self, frames: Sequence[Frame], deadline: Deadline | None
    ) -> tuple[list[tuple[int, bytes]], list[InfoGroup]]:
        if len(frames) > 2:
            raise ValueError(f"{len(frames)} frames of infos")
        rows = messages.unpack_rows(frames[0], self.num_envs)
        columns = unpack_columns(frames[1], self.num_envs) if len(frames) > 1 else []
        return rows, self._templates.read(columns, deadline)

    def _part(self, reply: Reply, deadline: Deadline | None) -> Batch:
        if isinstance(failure := reply.message, Failure):
            try:
                self._connection.fail(failure)
            except RequestRefused:  # now, for an interrupt before has the reply read again
                if failure.code == "refused":  # no other is under way: an interrupted SEND never arrived
                    self._sent[:] = False
                    for part in self._inbox.parts:
                        self._sent[part.env_ids] = True
                raise
        frames, count = reply.frames, len(self._fields)
        if len(frames) < count + 2:
            raise ValueError(f"{len(frames)} frames")
        env_ids = np.frombuffer(frames[0], np.int64).copy()
        if not env_ids.size or env_ids.min() < 0 or env_ids.max() >= self.num_envs or not self._sent[env_ids].all():
            raise ValueError("rows that were not sent")
        observations, _ = self._arrays(frames[1 : count + 1], _fields(self.leaves, len(env_ids)))
        results = split_results(bytearray(frames[count + 1]), len(env_ids))
        infos = self._infos(frames[count + 2 :], deadline) if len(frames) > count + 2 else ([], [])
        return Batch(observations, *results, *infos, env_ids)

    def wait(self, timeout: float | None, into: Sequence[np.ndarray] | None = None) -> Batch:
        self._into = into
        return self._read(timeout, self._batch)

    def _batch(self, reply: Reply, deadline: Deadline | None) -> Batch:
        if isinstance(reply.message, Failure):
            self._connection.fail(reply.message)
        frames, count = reply.frames, len(self._fields)
        results = 1 if reply.op == Op.STEP else 0
        if len(frames) < count + results:
            raise ValueError(f"{len(frames)} frames")
        left = frames[count + results :]
        rows, groups = self._infos(left, deadline) if left else ([], [])
        buffers = self._into
        if buffers is None and self._buffers is not None:
            buffers = self._buffers[self._turn]
        observations, received = self._arrays(frames[:count], self._fields, buffers)
        if self.keeps_last:
            self._last = received
        if not results:
            return Batch(observations, None, None, None, rows, groups)
        return Batch(observations, *split_results(bytearray(frames[count]), self.num_envs), rows, groups)

    def _keep_rows(self, part: Batch) -> None:
        if self._last is None or not all(last.flags.owndata for last in self._last):
            self._last = self.last_observations()  # arrays of a whole batch are views of its frames
        for last, leaf in zip(self._last, part.observations, strict=True):
            last[part.env_ids] = leaf

    def last_observations(self) -> list[np.ndarray]:
        if self._last is None:
            return [np.zeros(shape, dtype) for dtype, shape, _ in self._fields]
        return [*map(np.ndarray.copy, self._last)]

    def _arrays(
        self, frames: Sequence[Frame], fields: Sequence[_Field], buffers: Sequence[np.ndarray] | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The arrays for the caller, in these buffers or its own, and as they came.

        Large arrays of its own stay in their frames, which nothing else uses, unless the lane keeps what came.
        """
        arrays, received = [], []
        for number, (frame, (dtype, shape, size)) in enumerate(zip(frames, fields, strict=True)):
            whole = frame if self._decompress is None else self._decompress(frame, size)
            if len(whole) != size:
                raise ValueError(f"a frame of {len(whole)} bytes for an array of {size}")
            array: np.ndarray = np.ndarray(shape, dtype, whole)
            received.append(array)
            if buffers is not None:
                buffers[number][...] = array  # without the Python call that ``np.copyto`` is
                array = buffers[number]
            elif self.keeps_last or size < KEEP_BYTES or not (array.flags.aligned and array.flags.writeable):
                array = array.copy()
            arrays.append(array)
        return arrays, received


class InfoTemplates:
    """The forms of one session's infos, by number, which the hub describes once each."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._templates: dict[int, Template] = {}

    def read(self, columns: Sequence[Rows], deadline: Deadline | None = None) -> list[InfoGroup]:
        """The infos in these rows; the hub is asked for forms that were not seen before, again after ``HubTimeout``."""
        if unknown := [rows.template for rows in columns if rows.template not in self._templates]:
            if len(self._templates) + len(unknown) > TEMPLATES_MAX:
                self._templates.clear()
                unknown = [rows.template for rows in columns]
            request, timeout = TemplatesRequest(unknown), answer_timeout(deadline)
            reply = self._connection.ask(Op.TEMPLATES, request, timeout=timeout).message
            try:
                for number, example in zip(reply.numbers, reply.examples, strict=True):
                    self._templates[number] = Template(codec.decode(example))
            except (ValueError, TypeError, AttributeError, NotInColumns) as error:
                raise self._connection.breach(f"a template of infos cannot be read: {error}") from error
        return [self._group(*rows) for rows in columns]

    def _group(self, number: int, rows: np.ndarray, data: np.ndarray) -> InfoGroup:
        template = self._templates.get(number)
        if template is None or data.shape[1] != template.nbytes:
            raise self._connection.breach(
                f"infos of an unknown form, {number}, or of another size: {data.shape[1]} bytes"
            )
        return InfoGroup(template, rows, np.frombuffer(np.ascontiguousarray(data), template.dtype))


def _fields(leaves: Sequence[Leaf], rows: int) -> list[_Field]:
    arrays = [(np.dtype(leaf.dtype), (rows, *leaf.shape)) for leaf in leaves]
    return [(dtype, shape, math.prod(shape) * dtype.itemsize) for dtype, shape in arrays]


def _size(part: Batch) -> int:
    return 0 if part.env_ids is None else len(part.env_ids)
