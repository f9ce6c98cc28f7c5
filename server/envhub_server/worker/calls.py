"""Calls methods of a worker's envs, and reads and sets their attributes."""

from __future__ import annotations

import traceback
from typing import Any, Callable, Iterator, Sequence, Union

from envhub.values import codec
from envhub_server.ipc import control
from envhub_server.ipc.control import SetAttributes
from envhub_server.worker.context import PendingFailure, WorkerContext
from envhub_server.worker.gym_compat import is_wrapped
from envhub_server.worker.native_env import SubEnv
from envhub_server.worker.row import Row

RESERVED_CALLS = frozenset(["reset", "step", "close", "_setattr", "_check_spaces"])
# Methods that reach an attribute of any name.
ATTRIBUTE_CALLS = frozenset(
    ["get_wrapper_attr", "set_wrapper_attr", "has_wrapper_attr", "get_attr", "set_attr", "call"]
)

Target = Union[Row, SubEnv]
CallOrSetAttr = Union[control.CallRows, control.SetAttrRows]


class EnvCalls:
    """Executes the calls on one worker's envs, and answers them."""

    def __init__(self, context: WorkerContext) -> None:
        self._channel, self._envs, self._host, self._reports, self._progress = context
        self._attributes = SetAttributes()

    def call(self, call: control.CallRows) -> None:
        def run(target: Target) -> bytes:
            env = target.env
            if call.skip_unreset and target.awaits_first_reset and not (call.reset_first and self._reset_early(target)):
                return b""
            if call.question:
                return codec.encode(_QUESTIONS[call.question](env, call.name))
            if call.only_kind:
                return codec.encode(callable(env.get_wrapper_attr(call.name)))
            if call.name in RESERVED_CALLS:
                raise ValueError(
                    f"Trying to call function `{call.name}` with `call`, use `{call.name}` directly instead."
                )
            value = env.get_wrapper_attr(call.name)
            if callable(value):
                positional, named = codec.decode(call.args, self._envs.allow_pickle)
                if call.name in ATTRIBUTE_CALLS and not self._envs.allow_pickle:
                    _check_name(*positional[:1], **named)
                value = value(*positional, **named)
            return codec.encode(value, self._envs.exact)

        self._answer(call, run)

    def set_attribute(self, wanted: control.SetAttrRows) -> None:
        each = dict(zip(wanted.rows, wanted.each))

        def set_on(target: Target) -> bytes:
            blob = each.get(target.index, wanted.value)
            target.env.set_wrapper_attr(wanted.name, codec.decode(blob, self._envs.allow_pickle))
            self._attributes.note(control.SetAttrRows([target.index], wanted.name, blob))
            return b""

        if wanted.number:
            self._answer(wanted, set_on)
            return  # else the former envs had it
        for target in self._targets(wanted):
            try:
                set_on(target)
            except BaseException as error:
                what = f"the attribute {wanted.name!r} cannot be set again: {self._reports.in_a_line(error)}"
                self._channel.send(control.Suspicious(target.index, what))

    def set_all_again(self, rows: Sequence[int]) -> None:
        for message in self._attributes.again(rows):
            self.set_attribute(message)

    def _reset_early(self, target: Target) -> bool:
        try:
            target.reset_early()
        except BaseException as error:
            if isinstance(error, PendingFailure):
                raise
            traceback.print_exc()  # into the worker's log; the session's policy applies to the reset that is due
            return False
        return True

    def _targets(self, call: CallOrSetAttr) -> Iterator[Target]:
        is_noted = isinstance(call, control.SetAttrRows) or not call.skip_unreset
        for group in self._envs.groups:
            targets = group.targets(call.rows)
            if targets and is_noted and self._envs.trace is not None:
                self._envs.trace.called(group, [target.index for target in targets], call)
            for target in targets:
                self._progress.begin(target)
                yield target

    def _answer(self, call: CallOrSetAttr, run: Callable[[Target], bytes]) -> None:
        results = []
        for target in self._targets(call):
            try:
                results.append(run(target))
            except BaseException as error:
                failure = self._reports.describe(error, target.index)
                self._channel.send(control.CallFailed(failure, call.number))
                return
        try:
            self._channel.send(control.CallResults(results, call.number))
        except ValueError as error:
            failure = self._reports.describe(error, call.rows[0])
            self._channel.send(control.CallFailed(failure, call.number))


def _has_attribute(env: Any, name: str) -> bool:
    try:
        env.get_wrapper_attr(name)
    except AttributeError:
        return False
    return True


_QUESTIONS = {"exists": _has_attribute, "wrapped": is_wrapped}


def _check_name(name: Any = "", **others: Any) -> None:
    """Refuse a name that network clients may not use; the hub also refuses it in a request; raises ``ValueError``."""
    if isinstance(name, str) and name.startswith("_"):
        text = f"{name!r} begins with an underscore: only the program of a private hub (hub=None) may use such a name"
        raise ValueError(text)
