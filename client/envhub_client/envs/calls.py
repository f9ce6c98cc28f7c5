"""Calls of the envs of a session: of methods, for attributes, for frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envhub.errors import EnvTimeout, RequestRefused, WorkerDied
from envhub.protocol.messages import Call, SetAttr
from envhub.protocol.prelude import Frame
from envhub_client.deadline import Deadline
from envhub_client.envs.arguments import checked_env_ids
from envhub_client.envs.rendering import Rendering
from envhub_client.results.rendered import NOT_RESET
from envhub_client.session.base import VectorSession


class EnvCalls:
    """Makes calls through a session. ``what`` is the name of the method that does, for errors.

    ``env_ids`` are different numbers of envs, and None is every env; results are one for each, in their order. A hub
    may be too old for calls of some envs, which raises ``RequestRefused``.
    """

    def __init__(self, session: VectorSession) -> None:
        self._session = session
        self._num_envs = session.description.num_envs
        self._rendering = Rendering(self._num_envs, session.description.render_mode, session.options.faults)
        self._pending: Call

    # --- one call, begun and waited for -------------------------------------------------------------------------------

    def begin(self, what: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Begin a call of every env.

        Raises:
            EncodeError: an argument cannot be sent to a hub on the network.
            Exception: as for ``check``.
        """
        self.check(what, name)
        self._begin(self._of_method(name, args, kwargs))

    def _begin(self, call: Call) -> None:
        self._session.begin_call(call)
        self._pending = call

    def wait(self, timeout: float | None) -> tuple[Any, ...]:
        """The results of the call that was begun.

        Raises:
            HubTimeout: not done within ``timeout`` seconds; wait again.
            NothingPending: no call was begun.
            Exception: what an env raised.
        """
        rows, deadline = range(self._num_envs), None if timeout is None else Deadline(timeout)
        while True:
            try:
                results = self._decoded(self._session.wait_call(self._pending, timeout), rows)
            except (WorkerDied, EnvTimeout) as error:
                again: Call | None = self._rendering.after_failure(self._pending, error)
            else:
                again = self._rendering.again(self._pending, results)
            if again is None:
                return self._rendering.complete(self._pending, results, rows)
            self._begin(again)
            timeout = None if deadline is None else deadline.left_s()

    # --- calls that are waited for at once ----------------------------------------------------------------------------

    def method(
        self, what: str, name: str, args: Sequence[Any], kwargs: dict[str, Any], env_ids: Any
    ) -> tuple[Any, ...]:
        """The results of a method, or of an attribute, of these envs.

        Raises:
            Exception: as for ``begin`` and ``wait``.
        """
        rows = self._rows(what, name, env_ids)
        return self._called(self._of_method(name, args, kwargs, rows), rows)

    def are_callable(self, name: str, env_ids: Any) -> tuple[bool, ...]:
        """Whether the attribute of these envs can be called; nothing is called."""
        rows = self._rows("attr_is_callable", name, env_ids)
        return self._called(Call(name, b"", only_kind=True, rows=sorted(rows)), rows)

    def exist(self, name: str, env_ids: Any) -> tuple[bool, ...]:
        """Whether these envs have the attribute; nothing is called."""
        rows = self._rows("has_attr", name, env_ids)
        self._session.require(1, "has_attr")
        return self._called(Call(name, b"", rows=sorted(rows), question="exists"), rows)

    def are_wrapped(self, wrapper: type | str, env_ids: Any) -> tuple[bool, ...]:
        """Whether a wrapper of these envs is of this class, or extends it.

        Raises:
            TypeError: ``wrapper`` is neither a class nor its name, ``"module:Class"``.
        """
        if not isinstance(wrapper, type) and not (isinstance(wrapper, str) and ":" in wrapper):
            raise TypeError(f"is_wrapped takes a class or its name, 'module:Class', got {wrapper!r}")
        name = wrapper if isinstance(wrapper, str) else f"{wrapper.__module__}:{wrapper.__qualname__}"
        self._session.check_free("is_wrapped")
        self._session.require(1, "is_wrapped")
        rows = [] if env_ids is None else [*map(int, checked_env_ids(env_ids, self._num_envs))]
        return self._called(Call(name, b"", rows=sorted(rows), question="wrapped"), rows)

    def set_attribute(self, name: str, values: Any, env_ids: Any) -> None:
        """Set an attribute of these envs: one value for all, or a list or tuple with one for each.

        Raises:
            ValueError: a list or tuple of another length.
            Exception: as for ``method``.
        """
        rows = self._rows("set_attr", name, env_ids)
        count = len(rows) or self._num_envs
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

    def check(self, what: str, name: Any) -> None:
        """Check that a call of this name may be made.

        Raises:
            SessionBusy: another request is pending.
            SessionClosed: after ``close``.
            TypeError: the name is no str.
            RequestRefused: the name begins with an underscore, and the hub is not private.
        """
        self._session.check_free(what)
        if not isinstance(name, str):
            raise TypeError(f"the name of a method or attribute is a str, got {name!r}")
        if name.startswith("_") and not self._session.values.allow_pickle:
            raise RequestRefused(
                f"{name!r} begins with an underscore: a hub on the network gives and sets no such attribute of an env, "
                "and calls no such method; use a public name, or a private hub (hub=None)"
            )

    def _rows(self, what: str, name: Any, env_ids: Any) -> list[int]:
        """The rows of ``env_ids``, empty for all of them."""
        self.check(what, name)
        if env_ids is None:
            return []
        self._session.require(1, "calls of some envs")
        return [*map(int, checked_env_ids(env_ids, self._num_envs))]

    def _of_method(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], rows: Sequence[int] = ()) -> Call:
        """The call of a method; ``render`` leaves an env alone that was made again and not yet reset."""
        arguments = self._session.values.encode([list(args), kwargs])
        return Call(name, arguments, skip_unreset=name == "render", rows=sorted(rows), apart=True)

    def _called(self, call: Call, rows: Sequence[int]) -> tuple[Any, ...]:
        """The results of these rows, or of all if none is named; errors as for ``VectorSession.call``."""
        rows = rows or range(self._num_envs)
        while True:
            try:
                results = self._decoded(self._session.call(call), rows)
            except (WorkerDied, EnvTimeout) as error:
                call = self._rendering.after_failure(call, error)
                continue
            if (again := self._rendering.again(call, results)) is None:
                return self._rendering.complete(call, results, rows)
            call = again

    def _decoded(self, results: dict[int, Frame], rows: Sequence[int]) -> tuple[Any, ...]:
        """The result of each of these rows, ``NOT_RESET`` where an env was left alone.

        Raises:
            DecodeError: a result cannot be unpickled.
        """
        values = {row: self._session.values.decode(blob) if blob else NOT_RESET for row, blob in results.items()}
        return tuple(values[row] for row in rows)
