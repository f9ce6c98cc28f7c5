"""What a program asked for when it made envs."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gymnasium.envs.registration import EnvSpec


class Origin(NamedTuple):
    """What the envs of a vector env are made by.

    Attributes:
        env: their id or name, or their factories, or one for all of them.
        arguments: those that the program gave besides, of each env or of all of them.
        spec: the env's spec as this program has it; None for none.
        kwargs: with which ``spec`` makes the envs.
    """

    env: str | Sequence[Any]
    arguments: Sequence[Mapping[str, Any]] = ()
    spec: EnvSpec | None = None
    kwargs: Mapping[str, Any] = {}

    def described(self) -> tuple[str, list[dict[str, Any]]]:
        """The id or name, or where the factories are found, and the arguments of each env, for people."""
        if isinstance(self.env, str):
            return self.env, [*map(dict, self.arguments)]
        described = [_described(factory) for factory in self.env]
        return ", ".join(dict.fromkeys(place for place, _ in described)), [arguments for _, arguments in described]


def _described(factory: Any) -> tuple[str, dict[str, Any]]:
    """Where a factory is found, as ``module:name``, and the arguments that it was given by ``functools.partial``."""
    function, arguments = factory, {}
    if isinstance(factory, functools.partial):
        function, arguments = factory.func, factory.keywords
        with contextlib.suppress(TypeError, ValueError):  # which have no signature, or no such arguments
            arguments = inspect.signature(function).bind_partial(*factory.args, **factory.keywords).arguments
    name = getattr(function, "__qualname__", "")
    return (f"{function.__module__}:{name}" if name else repr(factory)), dict(arguments)
