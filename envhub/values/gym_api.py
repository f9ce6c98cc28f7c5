"""Gymnasium under one name: the package itself, or its ancestor gym in an interpreter that has no Gymnasium."""

from __future__ import annotations

import io
import pickle
from importlib import import_module
from typing import Any

try:
    api: Any = import_module("gymnasium")
except ModuleNotFoundError:
    api = import_module("gym")

_VECTORS = ("gymnasium.vector.", "gym.vector.", "stable_baselines3.common.vec_env.")
_PARTS = ("observation_space", "action_space", "reset", "step")


def registered() -> list[str]:
    """Every registered id."""
    registry = api.envs.registration.registry
    return sorted(getattr(registry, "env_specs", registry))


def unfit(made: Any) -> str:
    """A description of ``made`` if it is no single env that a worker can host; else empty. Imports nothing."""
    modules = [kind.__module__ + "." for kind in type(made).__mro__]
    if any(module.startswith("pettingzoo.") for module in modules):
        return "a PettingZoo env, of several agents; EnvHub hosts Gymnasium envs, of one agent each"
    if any(module.startswith(_VECTORS) for module in modules):
        return "a vector env; EnvHub makes the batch itself: give it a single env, and num_envs"
    if isinstance(made, type):
        return f"the class {made.__qualname__} in place of an env of that class"
    missing = [name for name in _PARTS if not hasattr(made, name)]
    return f"{made!r:.100}, which is no env: it has no {', '.join(missing)}" if missing else ""


def pickled(spec: Any) -> bytes:
    """An entry of the registry as bytes, which are equal in all processes that have the same entry.

    Raises:
        Exception: what a foreign object raises when it is pickled.
    """
    if not isinstance(spec.entry_point, str):
        return bytes(import_module("cloudpickle").dumps(spec))
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.fast = True  # no references to equal parts, because some processes have one object there and others two
    pickler.dump(spec)
    return buffer.getvalue()
