"""A vector env whose envs are called: their methods, attributes and frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import VectorEnv

from envhub.errors import EnvTimeout, RequestRefused, RestartsExhausted, WorkerDied
from envhub.protocol.messages import Call, SetAttr
from envhub.protocol.prelude import Frame
from envhub.values import codec
from envhub_client.deadline import Deadline
from envhub_client.envs.arguments import EnvIds, checked_env_ids
from envhub_client.frames import hiding_frames
from envhub_client.session.options import FaultOptions
from envhub_client.session.pending import exclusive, repeatable
from envhub_client.session.session import VectorSession

NO_ARGUMENTS = codec.encode([[], {}])
NOT_RESET = object()  # in place of the frame of an env that was made again after a failure and not yet reset

# Of frames where no frame of the envs was ever seen, by render mode.
_BLANK_SHAPES = {"rgb_array": (64, 64, 3), "depth_array": (64, 64)}


class Rendering:
    """Decides how a call goes on where it renders, and has a frame for each env; other calls it leaves as they are."""

    def __init__(self, num_envs: int, render_mode: str | None, faults: FaultOptions) -> None:
        self._faults = faults
        self._last: list[Any] = [None] * num_envs  # frames of envs that were rendered
        shape = _BLANK_SHAPES.get(render_mode or "")
        self._example: Any = None if shape is None else np.zeros(shape, np.uint8)  # the frame seen last
        self._unknown = render_mode not in (None, "human")  # how large frames are

    def again(self, call: Call, results: Sequence[Any]) -> Call | None:
        """The call to make after these results, to see how large frames are; None where they are known."""
        if call.skip_unreset and not call.reset_first and self._unknown and all(each is NOT_RESET for each in results):
            return replace(call, reset_first=True)
        return None

    def after_failure(self, call: Call, error: WorkerDied | EnvTimeout) -> Call:
        """The call to make after one in which an env died: it is made again, and left alone until its reset."""
        policy = self._faults.on_timeout if isinstance(error, EnvTimeout) else self._faults.on_crash
        if not call.skip_unreset or policy == "raise" or isinstance(error, RestartsExhausted):
            raise error
        if call.reset_first:
            self._unknown = False  # an env died when it was reset to show a frame: no second try
        return replace(call, reset_first=False)

    def complete(self, call: Call, results: tuple[Any, ...], rows: Sequence[int]) -> tuple[Any, ...]:
        """The results of the call for these rows; if it renders, the env's last frame, or a blank one, for each."""
        if not call.skip_unreset:
            return results
        self._unknown = False
        frames = [*results]
        for row, frame in zip(rows, results, strict=True):
            if frame is not NOT_RESET and frame is not None:
                self._example = frame
            if isinstance(frame, np.ndarray):
                self._last[row] = frame.copy()  # the caller may draw into the one returned
        for number, row in enumerate(rows):
            if results[number] is NOT_RESET:
                frames[number] = self._blank_frame() if self._last[row] is None else self._last[row].copy()
        return tuple(frames)

    def _blank_frame(self) -> Any:
        if isinstance(self._example, np.ndarray):
            return np.zeros_like(self._example)
        return type(self._example)() if isinstance(self._example, (list, str)) else None


class CallableVectorEnv(VectorEnv[Any, Any, np.ndarray]):
    """The part of a ``HubVectorEnv`` that makes calls, through its session."""

    _session: VectorSession
    _rendering: Rendering
    _pending_call = Call("", b"")
    _pending_rows: Sequence[int] = ()  # in the order of their results; empty for all

    @exclusive
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute; one result per env, in order.

        Raises:
            AttributeError: the envs have no such attribute. The session goes on, as after any exception here.
            ValueError: ``reset``, ``step`` and ``close`` are not to be called this way.
            RequestRefused: the name begins with an underscore, and the hub is not private.
            EncodeError: an argument cannot be sent to a hub on the network.
        """
        self._check_call("call_async", name)
        return self._called(self._call_of(name, args, kwargs))

    @exclusive
    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a call."""
        self._check_call("call_async", name)
        self._begin_call(self._call_of(name, args, kwargs))

    def _begin_call(self, call: Call, rows: Sequence[int] = ()) -> None:
        self._session.begin_call(call)
        self._pending_call, self._pending_rows = call, rows

    def _call_of(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], rows: Sequence[int] = ()) -> Call:
        """The call of a method; ``render`` leaves an env alone that was made again and not yet reset."""
        arguments = self._session.values.encode([list(args), kwargs]) if args or kwargs else NO_ARGUMENTS
        return Call(name, arguments, skip_unreset=name == "render", rows=sorted(rows), separate_frames=True)

    @repeatable
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the call begun by ``call_async``, for at most ``timeout`` seconds; errors as for ``step_wait``."""
        rows, deadline = self._pending_rows or range(self.num_envs), None if timeout is None else Deadline(timeout)
        while True:
            call = self._pending_call
            try:
                decode = self._decode_frame if call.skip_unreset else self._session.values.decode
                by_row = self._session.wait_call(call, timeout, decode)
                results = tuple(map(by_row.__getitem__, rows))
            except (WorkerDied, EnvTimeout) as error:
                again: Call | None = self._rendering.after_failure(call, error)
            else:
                again = self._rendering.again(call, results)
            if again is None:
                return self._rendering.complete(call, results, rows)
            self._begin_next(again)
            timeout = None if deadline is None else deadline.left_s()

    def _begin_next(self, call: Call) -> None:
        """Begin a call that the wait needs, too; interrupted, the wait repeats this."""
        pending = self._session.pending
        state, kept = pending.state, pending.kept
        try:
            self._begin_call(call, self._pending_rows)
        except BaseException:
            pending.give_up()
            pending.state, pending.kept = state, kept
            raise

    @exclusive
    def call_some(self, env_ids: EnvIds, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of these envs only; one result for each of ``env_ids``. Others stay untouched.

        Errors as for ``call``, and ``ValueError`` where ``env_ids`` are not different numbers of envs.
        """
        rows = self._checked_rows("call_some", name, env_ids)
        return self._called(self._call_of(name, args, kwargs, rows), rows)

    @exclusive
    def attr_is_callable(self, name: str, env_ids: EnvIds = None) -> tuple[bool, ...]:
        """Tell of every env, or of these, if the attribute is a method, or another callable; nothing is called.

        Errors as for ``call_some``.
        """
        rows = self._checked_rows("attr_is_callable", name, env_ids)
        return self._called(Call(name, b"", only_kind=True, rows=sorted(rows)), rows)

    @exclusive
    def has_attr(self, name: str, env_ids: EnvIds = None) -> tuple[bool, ...]:
        """Tell of every env, or of each of these, if it has the attribute; no method is called, and no value travels.

        Errors as for ``call_some``.
        """
        rows = self._checked_rows("has_attr", name, env_ids)
        return self._called(Call(name, b"", rows=sorted(rows), question="exists"), rows)

    @exclusive
    def is_wrapped(self, wrapper: type | str, env_ids: EnvIds = None) -> tuple[bool, ...]:
        """Tell of every env, or of each of these, if a wrapper of it is of this class or extends it.

        ``wrapper`` is the class or its name, ``"module:Class"``. Classes are compared by name, and none is imported.
        """
        if not isinstance(wrapper, type) and not (isinstance(wrapper, str) and ":" in wrapper):
            raise TypeError(f"is_wrapped takes a class or its name, 'module:Class', got {wrapper!r}")
        name = wrapper if isinstance(wrapper, str) else f"{wrapper.__module__}:{wrapper.__qualname__}"
        self._session.check_free("is_wrapped")
        rows = [] if env_ids is None else [*map(int, checked_env_ids(env_ids, self.num_envs))]
        return self._called(Call(name, b"", rows=sorted(rows), question="wrapped"), rows)

    @hiding_frames
    def get_attr(self, name: str, env_ids: EnvIds = None) -> tuple[Any, ...]:
        """An attribute of every env, or of these; a method is called. The same as ``call(name)`` or ``call_some``."""
        return self.call(name) if env_ids is None else self.call_some(env_ids, name)

    @exclusive
    def set_attr(self, name: str, values: Any, env_ids: EnvIds = None) -> None:
        """Set an attribute of every env, or of these: one value for all, or a list or tuple with one for each.

        Errors as for ``call_some``, and ``ValueError`` for a list or tuple of another length.
        """
        rows = self._checked_rows("set_attr", name, env_ids)
        count = len(rows) or self.num_envs
        if not isinstance(values, (list, tuple)):
            values = [values]
        elif len(values) != count:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {count} environments."
            )
        encoded = [self._session.values.encode(value) for value in values]
        if len(encoded) == len(rows):  # the hub takes rows, and with them their values, in ascending order
            encoded = [blob for _, blob in sorted(zip(rows, encoded, strict=True))]
        self._session.set_attr(SetAttr(name, encoded, sorted(rows)))

    @exclusive
    def render(self, env_ids: EnvIds = None) -> tuple[Any, ...]:
        """The rendered frame of every env, or of each of these; the others are not rendered.

        An env that failed, was made again and was not yet reset shows its last frame; if it never was rendered, a
        blank one. If no env was rendered before, this one is reset, and shows its first frame; its next step or reset
        resets it once more, by the same seed. ``call("render")`` and ``call_some`` do the same, and pass arguments to
        the envs' ``render``. Errors as for ``call_some``, and ``WorkerDied`` or ``EnvTimeout``, where the policy is to
        raise.
        """
        rows = self._checked_rows("render", "render", env_ids)
        return self._called(self._call_of("render", (), {}, rows), rows)

    @property
    def single_reward_space(self) -> Space[Any] | None:
        """The ``reward_space`` of the first env, as envs with several objectives have it.

        It is None where the env has none, where ``reward_space`` is a method, such as of a multi-agent env, and for
        ``vector=True``.
        """
        name, first = "reward_space", [0]
        if self._session.description.vector or not self.has_attr(name, first)[0]:
            return None
        if self.attr_is_callable(name, first)[0]:
            return None
        space: Space[Any] = self.get_attr(name, first)[0]
        return space

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """Every env's ``np_random_seed``."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of every env's random generator."""
        return self.get_attr("np_random")

    def _check_call(self, what: str, name: object) -> None:
        self._session.check_free(what)
        if not isinstance(name, str):
            raise TypeError(f"the name of a method or attribute is a str, got {name!r}")
        if name.startswith("_") and not self._session.values.allow_pickle:
            raise RequestRefused(
                f"{name!r} begins with an underscore: a hub on the network gives and sets no such attribute of an env, "
                "and calls no such method; use a public name, or a private hub (hub=None)"
            )

    def _checked_rows(self, what: str, name: object, env_ids: EnvIds) -> list[int]:
        """The rows of ``env_ids``; empty for None, which is all."""
        self._check_call(what, name)
        if env_ids is None:
            return []
        return [*map(int, checked_env_ids(env_ids, self.num_envs))]

    def _called(self, call: Call, rows: Sequence[int] = ()) -> tuple[Any, ...]:
        try:
            self._begin_call(call, rows)
            return self.call_wait()
        except BaseException as error:
            self._session.pending.forget(error)
            raise

    def _decode_frame(self, blob: Frame) -> Any:
        return self._session.values.decode(blob) if blob else NOT_RESET  # of an env that was left alone
