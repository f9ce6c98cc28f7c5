"""The envs of a vector env, each as a call on it sees it."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

from envhub_server.worker.native_env import NativeEnv


class SharedCall:
    """A call of the vector env on behalf of several of its envs."""

    def __init__(self, env: NativeEnv, whole: bool, reset_early: Callable[[], None]) -> None:
        self.env, self._whole, self._reset_early = env, whole, reset_early
        self._early: BaseException | bool = False  # whether all envs were reset early, or what that raised
        self._returned: list[Any] | None = None
        self._values: dict[int, Any] = {}

    def returned(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        if self._returned is None:
            self._returned = self.env.call(name, args, dict(kwargs or {}))
        return self._returned

    def reset_early(self) -> None:
        if self._early is False:
            try:
                self._reset_early()
                self._early = True
            except BaseException as error:
                self._early = error
        if isinstance(self._early, BaseException):
            raise self._early

    def check_whole(self, name: str) -> None:
        """Check that all envs are called; raises ``ValueError``."""
        if not self._whole:
            raise ValueError(f"{name!r} is the vector env's, and not of some of its envs only")

    def set(self, number: int, name: str, value: Any) -> None:
        self.check_whole(name)
        self._values[number] = value
        if len(self._values) == self.env.num_envs:
            self.env.set_attr(name, list(self._values.values()))


class SubEnv:
    """One env of a vector env, as a call on it sees it."""

    def __init__(self, index: int, number: int, shared: SharedCall, fresh: bool) -> None:
        self.index = self.turn = index
        self.env = self
        self.vector_env = shared.env.made
        self.awaits_first_reset = fresh
        self._number, self._shared = number, shared

    def reset_early(self) -> None:
        self._shared.reset_early()

    def get_wrapper_attr(self, name: str) -> Any:
        """Call as for a single env; a method of the vector env is called once for all of its envs.

        Raises ``AttributeError`` or ``ValueError``.
        """
        if not self._shared.env.is_callable(name):
            return self._shared.returned(name)[self._number]
        if name != "render":
            self._shared.check_whole(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._shared.returned(name, args, kwargs)[self._number]

        return call

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Set as for a single env; all envs of a vector env are set together. Raises ``ValueError``."""
        self._shared.set(self._number, name, value)
