"""Origin of envs: the request of a program."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gymnasium.envs.registration import EnvSpec

from envhub_client.session.description import SessionDescription


class Origin(NamedTuple):
    """Recipe of a vector env's envs.

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

    def vector_spec(self, description: SessionDescription, trusts_hub: bool) -> EnvSpec | None:
        """The spec that makes the vector env again, as ``gymnasium.make_vec`` says it in ``spec``; None for none.

        It is that of the envs, else that of the program. No spec says what factories do. What is run by it is the
        program's choice, and the hub's only with ``trusts_hub``.
        """
        single = description.env_spec or self.spec
        if single is None or not isinstance(self.env, str):
            return None
        spec = copy.deepcopy(single)
        if self.spec is not None and not trusts_hub:
            for name in ("entry_point", "vector_entry_point", "additional_wrappers"):
                setattr(spec, name, copy.deepcopy(getattr(self.spec, name)))
        mode = "vector_entry_point" if description.vector else "async"
        spec.kwargs = {**self.kwargs, "num_envs": description.num_envs, "vectorization_mode": mode}
        return spec

    def described(self) -> tuple[str, list[dict[str, Any]]]:
        """The id or name, or where the factories are found, and the arguments of each env, for people."""
        if isinstance(self.env, str):
            return self.env, [*map(dict, self.arguments)]
        described = [_described(factory) for factory in self.env]
        return ", ".join(dict.fromkeys(place for place, _ in described)), [arguments for _, arguments in described]


def _described(factory: Any) -> tuple[str, dict[str, Any]]:
    """Name of a factory, as ``module:name``, and the arguments that it was given by ``functools.partial``."""
    function, arguments = factory, {}
    if isinstance(factory, functools.partial):
        function, arguments = factory.func, factory.keywords
        with contextlib.suppress(TypeError, ValueError):  # which have no signature, or no such arguments
            arguments = inspect.signature(function).bind_partial(*factory.args, **factory.keywords).arguments
    name = getattr(function, "__qualname__", "")
    return (f"{function.__module__}:{name}" if name else repr(factory)), dict(arguments)
