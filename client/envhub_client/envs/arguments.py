"""The request of a program: arguments of constructors, ``reset``, ``step`` and ``send``, and the origin of envs."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from multiprocessing import get_all_start_methods
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from envhub.errors import SpaceMismatch
from envhub.values import spaces
from envhub.values.spaces import space_mismatch
from envhub_client.session.description import REMOTE, SessionDescription, own_spec

EnvIds = Sequence[int] | np.ndarray | None  # numbers of envs; None for all


def seeds_of(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    if seed is None:
        return []
    if isinstance(seed, (int, np.integer)):
        return [operator.index(seed) + row for row in range(num_envs)]
    if len(seed) != num_envs:
        lengths = f"num_envs={num_envs} but got length={len(seed)}."
        raise ValueError(f"If seeds are passed as a list the length must match {lengths}")
    return [None if one is None else operator.index(one) for one in seed]


def options_of(options: Sequence[dict[str, Any] | None], num_envs: int) -> Sequence[dict[str, Any] | None]:
    if len(options) != num_envs:
        raise ValueError(
            f"If options are passed as a list the length must match num_envs={num_envs}, got {len(options)}"
        )
    for row, each in enumerate(options):
        if not (each is None or isinstance(each, dict)):
            raise TypeError(f"the options of env {row} are a dict or None, got {each!r}")
    return options


def split_mask(options: dict[str, Any] | None, num_envs: int) -> tuple[list[bool], dict[str, Any] | None]:
    """The mask, or an empty one, and the options without it."""
    if not isinstance(options, (Mapping, type(None))):
        raise TypeError(f"options must be a dict, or a list with one or None for each env, got {options!r}")
    if options is None or "reset_mask" not in options:
        return [], options
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not np.any(mask):
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return mask.tolist(), {key: value for key, value in options.items() if key != "reset_mask"}


def checked_env_ids(env_ids: EnvIds, num_envs: int) -> np.ndarray:
    rows = np.arange(num_envs) if env_ids is None else np.asarray(env_ids)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or not rows.size:
        raise ValueError(f"env_ids must be a sequence of numbers of envs, got {env_ids!r}")
    if rows.min() < 0 or rows.max() >= num_envs or len(np.unique(rows)) < len(rows):
        raise ValueError(f"env_ids must be different numbers from 0 to {num_envs - 1}, got {env_ids!r}")
    return rows.astype(np.int64)


def parts_of_actions(space: Space[Any], actions: Any, count: int) -> list[Any]:
    try:
        return spaces.flatten(space, actions)
    except (LookupError, TypeError, ValueError) as error:
        why = space_mismatch(batch_space(space, count), actions, "actions") or error
        raise SpaceMismatch(f"actions that do not nest as their space does: {why}; no env has moved") from error


def check_start_method(name: str | None) -> None:
    if name not in (None, *get_all_start_methods()):
        raise ValueError(f"cannot find context for {name!r}")


class Origin(NamedTuple):
    """Recipe of a vector env's envs."""

    env: str | Sequence[Any]  # their id or name, or their factories, or one for all of them
    arguments: Sequence[Mapping[str, Any]] = ()  # that the program gave besides, of each env or of all of them
    spec: EnvSpec | None = None  # as this program has it
    kwargs: Mapping[str, Any] = {}  # with which ``spec`` makes the envs

    def vector_spec(self, description: SessionDescription, trusts_hub: bool) -> EnvSpec | None:
        """The spec that makes the vector env again, as ``gymnasium.make_vec`` says it in ``spec``; None of factories.

        What is run by it is the program's choice, and the hub's only with ``trusts_hub``.
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
        return ", ".join(dict.fromkeys(name for name, _ in described)), [arguments for _, arguments in described]


def _described(factory: Any) -> tuple[str, dict[str, Any]]:
    """Name of a factory, as ``module:name``, and the arguments that it was given by ``functools.partial``."""
    function, arguments = factory, {}
    if isinstance(factory, functools.partial):
        function, arguments = factory.func, factory.keywords
        with contextlib.suppress(TypeError, ValueError):  # which have no signature, or no such arguments
            arguments = inspect.signature(function).bind_partial(*factory.args, **factory.keywords).arguments
    name = getattr(function, "__qualname__", "")
    return (f"{function.__module__}:{name}" if name else repr(factory)), dict(arguments)


def environment(envs: VectorEnv[Any, Any, Any]) -> EnvSpec | None:
    """Spec by which one env of ``envs`` can be made here; None if it cannot be written down.

    It is the env's own spec if the envs are this program's own, or as for ``own_spec``; else it is an env of the same
    hub, by ``EnvHub/Remote-v0``.
    """
    base: Any = envs.unwrapped
    if base.env_spec is None:
        return None if base.address is None or base.named is None else _remote(base.address, *base.named)
    spec: EnvSpec = copy.deepcopy(base.env_spec)
    if "vectorization_mode" in spec.kwargs:  # it makes a vector env
        return None
    if any(wrapper.kwargs is None for wrapper in spec.additional_wrappers):  # those of a wrapper are not known
        return None
    if base.address is None:
        return spec
    if (own := own_spec(spec, {} if base.named is None else base.named[1])) is not None:
        spec.entry_point, spec.vector_entry_point = own.entry_point, own.vector_entry_point
        return spec
    return _remote(base.address, spec.id, spec.kwargs)


def _remote(address: str, env_id: str, kwargs: dict[str, Any]) -> EnvSpec:
    remote = copy.deepcopy(gymnasium.spec(REMOTE))
    # Apart, because some may be the hub's choice: among its own arguments, ``record`` would name a folder here.
    remote.kwargs = {"env_kwargs": kwargs, "env_id": env_id, "url": address}
    return remote
