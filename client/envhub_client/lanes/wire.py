"""The wire lane: one request and one reply per step, over ZeroMQ."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from envhub.errors import EnvHubError, HubTimeout, RemoteProtocolError, RequestRefused
from envhub.protocol import messages
from envhub.protocol.client import Reply
from envhub.protocol.messages import Call, Failure, Op, Receive, Reset, Send, SetAttr, Step, TemplatesRequest
from envhub.protocol.prelude import Frame
from envhub.values import codec
from envhub.values.actions import split_results
from envhub.values.compression import decompressor
from envhub.values.info_columns import NotInColumns, Rows, Template, unpack_columns
from envhub.values.leaf import Leaf
from envhub_client.connection.connection import Connection
from envhub_client.connection.failures import SESSION_FAILS
from envhub_client.deadline import Deadline, answer_timeout
from envhub_client.lanes.base import Batch, Decode, InfoGroup, checked_item_sizes, joined, new_batch

# Up to here, copying a received frame costs less than keeping alive the whole receive buffer that it is part of.
KEEP_BYTES = 1 << 16
TEMPLATES_MAX = 4096  # forms of infos; beyond that all are forgotten, and those in use are asked for again

_Field = tuple[np.dtype[Any], tuple[int, ...], int]  # dtype, shape and size in bytes of a batch of a leaf


class _Part(NamedTuple):
    """Results of some envs, or the error in their place."""

    env_ids: np.ndarray
    batch: Batch | None
    error: Exception | None = None


class WireLane:
    """Requests and replies over a connection; without ``copy`` two sets of buffers for observations alternate."""

    name = "wire"

    def __init__(
        self,
        connection: Connection,
        num_envs: int,
        leaves: Sequence[Leaf],
        copy: bool,
        compression: str = "",
        keeps_last: bool = False,
    ) -> None:
        self.num_envs = num_envs
        self.leaves = leaves
        self.copy = copy
        self.connection = connection
        self._fields = _fields(leaves, num_envs)
        zeros = [(shape, dtype) for dtype, shape, _ in self._fields]
        self._buffers = None if copy else [[np.zeros(*wanted) for wanted in zeros] for _ in range(2)]
        self._buffer_index = 0
        self._step = Step(b"")  # the last one's codes, which mostly are the next one's, too
        self._call: Call | SetAttr = Call("", b"")  # the last one
        self._sent_bytes = bytearray(num_envs)
        self._sent = np.frombuffer(self._sent_bytes, np.bool_)  # quicker for parts, and that for each step
        self._begun_rows: tuple[np.ndarray, tuple[int, ...]] | None = None  # to be sent, and progress before
        self._rows_of: dict[int, np.ndarray] = {}  # of each SEND whose reply was not read, by seq
        self._parts: dict[int, _Part] = {}  # that came and were not taken, by the seq of the request
        self._wanted = 0  # how many results the last wait wanted, as the next one may
        self._min_envs = 0  # how many the hub waits for
        self._item_sizes: list[int] = []  # of the actions of the outstanding envs
        self._reply: Reply | None = None  # to the reset or step of all envs, for whose infos the hub may be asked more
        self.templates = InfoTemplates(connection)
        self._decompress = decompressor(compression) if compression else None
        self.keeps_last = keeps_last
        self._last: list[np.ndarray] | None = None  # of each leaf, as they came; None before the first ones

    def settle(self) -> bool:
        self._note_begun()
        return 1 in self._sent_bytes

    def breach(self, row: int, what: str) -> NoReturn:
        raise self.connection.breach(what)

    def begin_reset(self, reset: Reset) -> None:
        self._reply, self._buffer_index = None, 1 - self._buffer_index
        self.connection.send(Op.RESET, reset, keep=True)

    def begin_step(self, codes: bytes, arrays: Sequence[np.ndarray], out_of_band: bytes) -> None:
        self._reply, self._buffer_index = None, 1 - self._buffer_index
        if codes != self._step.codes:
            self._step = Step(codes)
        frames = [*map(np.ndarray.tobytes, arrays)]
        self.connection.send(Op.STEP, self._step, [*frames, out_of_band] if out_of_band else frames, keep=True)

    def begin_call(self, message: Call | SetAttr) -> None:
        self._call = message
        self.connection.send(Op.CALL if isinstance(message, Call) else Op.SET_ATTR, message, keep=True)

    def wait_call(self, timeout: float | None, decode: Decode) -> dict[int, Any]:
        """The result of each row of the call, or none of an attribute that is set; errors as for ``wait``."""
        call, reply = self._call, self.connection.result(timeout)
        if not isinstance(call, Call):
            return {}
        wanted = [*(call.rows or range(self.num_envs))]
        try:
            if len(reply.frames) == 1:
                results: Sequence[tuple[int, Frame]] = messages.unpack_rows(reply.frames[0], self.num_envs)
            else:
                results = [*zip(wanted, reply.frames, strict=True)]
            if (rows := [row for row, _ in results]) != wanted:
                raise ValueError(f"results of envs {rows}")
        except ValueError as error:
            raise self._misfit(reply, error) from error
        return {row: decode(blob) for row, blob in results}

    @property
    def progress(self) -> tuple[int, ...]:
        return (self.connection.protocol.last_seq,)

    @property
    def outstanding(self) -> int:
        return self._sent_bytes.count(1)

    @property
    def are_outstanding(self) -> np.ndarray:
        return self._sent

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        self._item_sizes = checked_item_sizes(self._sent, env_ids, arrays, self._item_sizes)
        with self.connection.in_use:
            self.connection.await_room()
            self._min_envs = self._wanted or len(env_ids)  # a guess, which the next wait corrects
            send, frames = Send(env_ids.tolist(), codes, self._min_envs), [array.tobytes() for array in arrays]
            self._begun_rows = env_ids, self.progress
            try:
                self.connection.send(Op.SEND, send, frames, keep=True)
            except RequestRefused as error:  # such as one that is too large
                raise ValueError(str(error)) from error
            finally:
                self._note_begun()

    def _note_begun(self) -> None:
        """Note the envs of a SEND as outstanding, unless an error or interrupt came before it was begun."""
        if self._begun_rows is not None:
            (env_ids, before), progress = self._begun_rows, self.progress
            if progress != before:
                self._rows_of[progress[0]] = env_ids
                self._sent[env_ids] = True
            self._begun_rows = None

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        deadline = None if timeout is None else Deadline(timeout)
        try:
            with self.connection.in_use:
                self._wanted = min_envs
                while (missing := min_envs - self._received(deadline)) > 0:
                    self._ask(missing)
                    self.connection.await_received(None if deadline is None else deadline.left_s())
        except SESSION_FAILS as error:
            error.env_ids = np.flatnonzero(self._sent).tolist()
            raise
        return joined([part.batch for part in self._parts.values() if part.batch is not None])

    def done_rows(self, min_envs: int = 1) -> int:
        with self.connection.in_use:
            self._wanted, asked = min_envs, True
            while asked:  # to look again: a send, too, may take in what libzmq has signalled by ``descriptors``
                if self.connection.protocol.receives:
                    with contextlib.suppress(HubTimeout):
                        self.connection.await_received(0)
                with contextlib.suppress(HubTimeout):  # the forms of some infos are to be asked for again
                    self._received(Deadline(0))
                count = self._count_received()
                asked = count < self.outstanding and self._ask(max(1, min_envs - count))  # others may have less
            return count

    def _received(self, deadline: Deadline | None) -> int:
        """The number of envs whose results have come, or one's error is raised."""
        protocol = self.connection.protocol
        while protocol.received:  # in steps that can be done again after an interrupt
            reply = protocol.received[0]
            if (part := self._part(reply, deadline)) is not None:
                self._parts[reply.seq] = part
            protocol.received = protocol.received[1:]
            self._rows_of.pop(reply.seq, None)
        for part in self._parts.values():
            if isinstance(part.error, EnvHubError):
                part.error.env_ids = part.env_ids.tolist()
            if part.error is not None:
                raise part.error
        return self._count_received()

    def _ask(self, missing: int) -> bool:
        """Ask for the results of so few further envs, unless the hub sends them once they are done."""
        protocol = self.connection.protocol
        asks = protocol.has_room and not (protocol.receives and self._min_envs <= missing)
        if asks:
            self._min_envs = missing
            self.connection.send(Op.RECEIVE, Receive(missing), keep=True)
        return asks

    def _count_received(self) -> int:
        return sum(len(part.env_ids) for part in self._parts.values())

    def _part(self, reply: Reply, deadline: Deadline | None) -> _Part | None:
        """The results in a reply to SEND or RECEIVE, or an error in their place; None if it has neither."""
        if isinstance(reply.message, Failure):
            return self._failed_part(reply)
        if not reply.frames:
            return None
        try:
            return self._done_part(reply, deadline)
        except ValueError as error:
            raise self._misfit(reply, error) from error

    def _failed_part(self, reply: Reply) -> _Part:
        failure, sent = reply.message, self._rows_of.get(reply.seq)
        if failure.env_index is not None:
            env_ids = np.array([failure.env_index])
        elif failure.scope == "request" and sent is not None:
            rows = (sent + self.connection.row_offset).tolist()
            text = f"the hub refused the actions of envs {rows}, which have not moved: {failure.message}"
            env_ids, failure = sent, replace(failure, message=text)
        else:
            self.connection.fail(failure)
        try:
            self.connection.fail(failure)
        except Exception as error:
            return _Part(env_ids, None, error)

    def _done_part(self, reply: Reply, deadline: Deadline | None) -> _Part:
        frames, count = reply.frames, len(self._fields)
        if len(frames) < count + 2:
            raise ValueError(f"{len(frames)} frames")
        env_ids = np.frombuffer(frames[0], np.int64).copy()
        if not env_ids.size or env_ids.min() < 0 or env_ids.max() >= self.num_envs or not self._sent[env_ids].all():
            raise ValueError("rows that were not sent")
        observations, _ = self._arrays(frames[1 : count + 1], _fields(self.leaves, len(env_ids)))
        results = split_results(bytearray(frames[count + 1]), len(env_ids))
        infos = self._infos(frames[count + 2 :], deadline) if len(frames) > count + 2 else ([], [])
        return _Part(env_ids, Batch(observations, *results, *infos, env_ids))

    def descriptors(self) -> Sequence[int]:
        return self.connection.descriptors

    def taken(self, env_ids: np.ndarray) -> None:
        left = self._sent.copy()
        left[env_ids] = False
        for seq, part in [*self._parts.items()]:
            if not left[part.env_ids].any():
                if self.keeps_last and part.batch is not None:
                    self._keep_rows(part.batch)
                del self._parts[seq]
        self._sent[env_ids] = False  # last: a lane of a lost hub's rows repeats this for rows that are outstanding

    def _misfit(self, reply: Reply, error: ValueError) -> RemoteProtocolError:
        return self.connection.breach(f"a {reply.op.name} reply does not fit the session: {error}")

    def _infos(
        self, frames: Sequence[Frame], deadline: Deadline | None
    ) -> tuple[list[tuple[int, bytes]], list[InfoGroup]]:
        if len(frames) > 2:
            raise ValueError(f"{len(frames)} frames of infos")
        rows = messages.unpack_rows(frames[0], self.num_envs)
        columns = unpack_columns(frames[1], self.num_envs) if len(frames) > 1 else []
        return rows, self.templates.read(columns, deadline)

    def wait(self, timeout: float | None, into: Sequence[np.ndarray] | None = None) -> Batch:
        deadline = None if timeout is None else Deadline(timeout)
        self._reply = reply = self._reply or self.connection.wait(timeout)
        if isinstance(reply.message, Failure):
            self.connection.fail(reply.message)
        frames, count = reply.frames, len(self._fields)
        results = 1 if reply.op == Op.STEP else 0
        try:
            if len(frames) < count + results:
                raise ValueError(f"{len(frames)} frames")
            left = frames[count + results :]
            rows, groups = self._infos(left, deadline) if left else ([], [])
            if into is None and self._buffers is not None:
                into = self._buffers[self._buffer_index]
            observations, received = self._arrays(frames[:count], self._fields, into)
            flags: tuple[Any, Any, Any] = None, None, None
            if results:
                flags = split_results(bytearray(frames[count]), self.num_envs)
        except ValueError as error:
            raise self._misfit(reply, error) from error
        if self.keeps_last:
            self._last = received
        return new_batch((observations, *flags, rows, groups, None))

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
        return InfoGroup(template, rows, data.view(template.dtype)[:, 0])


def _fields(leaves: Sequence[Leaf], rows: int) -> list[_Field]:
    arrays = [(np.dtype(leaf.dtype), (rows, *leaf.shape)) for leaf in leaves]
    return [(dtype, shape, math.prod(shape) * dtype.itemsize) for dtype, shape in arrays]
