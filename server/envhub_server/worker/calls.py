"""Calls methods of a worker's envs, and reads and sets their attributes."""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from typing import Any, Callable, Iterator, Sequence, Union

import numpy as np

from envhub.arena.memory import STATUS_INFO, STATUS_OK, STATUS_RAISED, Arena
from envhub.protocol import messages
from envhub.values import codec
from envhub_server.ipc import control
from envhub_server.ipc.control import SetAttributes
from envhub_server.worker.context import PendingFailure, WorkerContext
from envhub_server.worker.gym_compat import is_wrapped
from envhub_server.worker.native_env import SubEnv
from envhub_server.worker.row import Row
from envhub_server.worker.row_memory import put_info
from envhub_server.worker.snapshot_row import SnapshotRow
from envhub_server.worker.trace_writer import values_by_row

RESERVED_CALLS = frozenset(["reset", "step", "close", "_setattr", "_check_spaces"])
# Methods that reach an attribute of any name.
ATTRIBUTE_CALLS = frozenset(
    ["get_wrapper_attr", "set_wrapper_attr", "has_wrapper_attr", "get_attr", "set_attr", "call"]
)

Target = Union[Row, SubEnv]
Verb = Union[messages.Call, messages.SetAttr, control.SetAttrRows]


class EnvCalls:
    """Executes the calls on one worker's envs, and stores their results as infos are."""

    def __init__(self, context: WorkerContext) -> None:
        self._channel, self._envs, self._host, self._reports, self._progress = context
        self._attributes = SetAttributes()

    def attach(self, arena: Arena) -> None:
        self._arena, self._allow_pickle, self._exact = arena, self._envs.allow_pickle, self._envs.exact
        columns = arena.request, arena.status, arena.info_template, arena.info_length
        self._words: Any = [column.data for column in columns]

    def call(self, call: messages.Call, rows: Sequence[int]) -> None:
        """Make a call on these rows, which are posted for it; their ``done`` words are stored last."""

        def run(target: Target) -> list[Any]:
            env = target.env
            if call.skip_unreset and target.awaits_first_reset and not (call.reset_first and self._reset_early(target)):
                return []
            if call.question:
                return [codec.encode(_QUESTIONS[call.question](env, call.name))]
            if call.only_kind:
                return [codec.encode(callable(env.get_wrapper_attr(call.name)))]
            if call.name in RESERVED_CALLS:
                raise ValueError(
                    f"Trying to call function `{call.name}` with `call`, use `{call.name}` directly instead."
                )
            value = env.get_wrapper_attr(call.name)
            if callable(value):
                positional, named = codec.decode(call.args, self._allow_pickle)
                if call.name in ATTRIBUTE_CALLS and not self._allow_pickle:
                    _check_name(*positional[:1], **named)
                if call.name != "render":
                    _note_change(target)
                value = value(*positional, **named)
            return codec.encode_pieces(value, self._exact)

        self._answer(call, rows, run)

    def set_attribute(self, wanted: messages.SetAttr, rows: Sequence[int]) -> None:
        """Set an attribute of these rows, as ``call``; the hub is told, which sets it on the next envs."""
        each, done = values_by_row(wanted, self._arena.layout.rows), control.SetAttrRows([], wanted.name, [])
        is_told = self._attributes.has(control.SetAttrRows([*rows], wanted.name, [each.get(row, b"") for row in rows]))

        def run(target: Target) -> list[Any]:
            self._set(target, wanted.name, each[target.index])
            done.rows.append(target.index)
            done.values.append(each[target.index])
            return []

        self._answer(wanted, rows, run, None if is_told else done)

    def set_again(self, wanted: control.SetAttrRows) -> None:
        """Set an attribute that the former envs of these rows had."""
        each = values_by_row(wanted, len(wanted.rows))
        for target in self._targets(wanted, wanted.rows):
            try:
                self._set(target, wanted.name, each[target.index])
            except BaseException as error:
                what = f"the attribute {wanted.name!r} cannot be set again: {self._reports.one_line(error)}"
                self._channel.send(control.Suspicious(target.index, what))
        self._progress.rest()

    def set_all_again(self, rows: Sequence[int]) -> None:
        for message in self._attributes.again(rows):
            self.set_again(message)

    def _set(self, target: Target, name: str, blob: bytes) -> None:
        _note_change(target)
        target.env.set_wrapper_attr(name, codec.decode(blob, self._envs.allow_pickle))
        self._attributes.add(control.SetAttrRows([target.index], name, [blob]))

    def _reset_early(self, target: Target) -> bool:
        try:
            target.reset_early()
        except BaseException as error:
            if isinstance(error, PendingFailure):
                raise
            traceback.print_exc()  # into the worker's log; the session's policy applies to the reset that is due
            return False
        return True

    def _targets(self, verb: Verb, rows: Sequence[int]) -> Iterator[Target]:
        is_traced = not (isinstance(verb, messages.Call) and verb.skip_unreset)
        for group in self._envs.groups:
            targets = group.targets(rows)
            if targets and is_traced and self._envs.trace is not None:
                self._envs.trace.called(group, [target.index for target in targets], verb)
            for target in targets:
                self._progress.begin(target)
                yield target

    def draw(self, wanted: control.Draw) -> None:
        """Draw an env for somebody who looks at it. Its program sees nothing of that: no generator goes on by it."""
        if time.monotonic() > wanted.until_s:
            return
        try:
            target = next(each for group in self._envs.groups for each in group.targets([wanted.row]))
            if target.awaits_first_reset:
                raise ValueError("it was not reset yet")
            self._progress.begin(target)
            try:
                with _kept_generators(target.env):
                    pixels = _pixels(target.env.get_wrapper_attr("render")())
            finally:
                self._progress.rest()
            drawn = control.Drawn(wanted.number, list(pixels.shape), pixels.tobytes())
        except BaseException as error:
            drawn = control.Drawn(wanted.number, problem=self._reports.one_line(error))
        self._channel.send(drawn)

    def _answer(
        self,
        verb: messages.Call | messages.SetAttr,
        rows: Sequence[int],
        run: Callable[[Target], list[Any]],
        done: control.SetAttrRows | None = None,
    ) -> None:
        """Store the results, or what an env raised, after which no other is called; tell the hub what is ``done``."""
        arena, at = self._arena, rows[0]
        request, status, template, length = self._words  # which NumPy takes ten times as long to store one by one
        begun, finished = arena.begun.data, arena.done.data
        for row in rows:
            begun[row], length[row], status[row] = request[row], 0, STATUS_OK
        try:
            if not self._allow_pickle and getattr(verb, "question", "") != "wrapped":
                _check_name(verb.name)
            try:
                for target in self._targets(verb, rows):
                    at = target.index
                    if pieces := run(target):
                        template[at], length[at] = put_info(arena, at, self._channel.send, *pieces)
                        status[at] = STATUS_INFO
            finally:  # what was set before an env raised stays set
                if done is not None and done.rows:
                    self._channel.send(done)
        except BaseException as error:
            self._reports.send(error, at, "env_raised", request[at], is_call=True)
            status[at] = STATUS_RAISED
        for row in rows:
            finished[row] = request[row]


def _note_change(target: Target) -> None:
    if isinstance(target, SnapshotRow):
        target.forget_requests()


def _has_attribute(env: Any, name: str) -> bool:
    try:
        env.get_wrapper_attr(name)
    except AttributeError:
        return False
    return True


@contextlib.contextmanager
def _kept_generators(env: Any) -> Iterator[None]:
    """Leave the generators of the process, and those that the env has, as they are before."""
    own = getattr(getattr(env, "unwrapped", None), "__dict__", {})  # a property may make one
    of_env = [
        (own[name].bit_generator, own[name].bit_generator.state)
        for name in ("_np_random", "np_random")
        if hasattr(own.get(name), "bit_generator")
    ]
    numpy_state, python_state = np.random.get_state(legacy=False), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for generator, state in of_env:
            generator.state = state


def _pixels(drawn: Any) -> Any:
    frame = np.ascontiguousarray(drawn)
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] not in (1, 3, 4) or not frame.size:
        raise ValueError(f"render returned no frame of bytes, but {frame.dtype} of shape {frame.shape}")
    if max(frame.shape) > control.FRAME_SIDE_MAX or frame.nbytes > control.FRAME_BYTES_MAX:
        text = f"render returned a frame of {frame.shape}; of {control.FRAME_BYTES_MAX} bytes at most it is shown"
        raise ValueError(text)
    return frame


_QUESTIONS = {"exists": _has_attribute, "wrapped": is_wrapped}


def _check_name(name: Any = "", **others: Any) -> None:
    """Refuse a name that network clients may not use; the hub also refuses it in a request; raises ``ValueError``."""
    if isinstance(name, str) and name.startswith("_"):
        text = f"{name!r} begins with an underscore: only the program of a private hub (hub=None) may use such a name"
        raise ValueError(text)
