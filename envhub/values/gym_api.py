"""Gymnasium under one name: the package itself, or its ancestor gym in an interpreter without Gymnasium."""

from __future__ import annotations

import copy
import io
import pickle
from importlib import import_module
from typing import Any, Mapping

from envhub.errors import brief

try:
    api: Any = import_module("gymnasium")
except ModuleNotFoundError:
    api = import_module("gym")

_VECTORS = ("envpool.", "gymnasium.vector.", "gym.vector.", "stable_baselines3.common.vec_env.")

MULTI_AGENT = "envhub.multi_agent"  # in the metadata of a parallel env of PettingZoo that a worker hosts
GYMNASIUM, DM_ENV, PARALLEL = "env", "dm_env environment", "PettingZoo parallel env"
_PARTS = {
    GYMNASIUM: ("observation_space", "action_space", "reset", "step"),
    DM_ENV: ("observation_spec", "action_spec", "reset", "step"),
    PARALLEL: ("possible_agents", "observation_space", "action_space", "reset", "step"),
}
# The fields of a Box, of a MultiDiscrete or MultiBinary, of a Discrete, and of a Dict or Tuple.
_FIELDS = (("low", "high", "shape", "dtype"), ("nvec",), ("n",), ("spaces",))


def registered(package: Any = api) -> list[str]:
    return sorted(specs(package))


def specs(package: Any = api) -> Mapping[str, Any]:
    registry = package.envs.registration.registry
    by_id: Mapping[str, Any] = getattr(registry, "env_specs", registry)
    return by_id


def interface(made: Any) -> str:
    """The interface that ``made`` has in part; a parallel env of PettingZoo has methods of the spaces' names."""
    if callable(getattr(made, "observation_space", None)):
        return PARALLEL
    # The order matters: wrappers of Gymnasium 0.29 warn about attributes that their env does not have.
    return DM_ENV if not hasattr(made, "observation_space") and hasattr(made, "observation_spec") else GYMNASIUM


def is_like_space(space: Any) -> bool:
    """True if it is a space of Gymnasium or gym, or has the fields of one, as in libraries that need neither."""
    if any(each.__name__ == "Space" for each in type(space).__mro__):
        return True
    return not isinstance(space, type) and any(all(hasattr(space, name) for name in names) for names in _FIELDS)


def takes_turns(made: Any) -> bool:
    """True if it is an AEC env of PettingZoo, whose agents act one after the other. Imports nothing."""
    return not isinstance(made, type) and interface(made) == PARALLEL and hasattr(made, "agent_iter")


def why_not_env(made: Any) -> str:
    """A description of ``made`` if a worker cannot host it as a single env; else empty. Imports nothing."""
    modules = [kind.__module__ + "." for kind in type(made).__mro__]
    if hasattr(type(made), "step_async") or any(module.startswith(_VECTORS) for module in modules):
        return (
            "a vector env: pass vector=True (an operator says vector = true in the env's table), and it gets num_envs; "
            "or give a single env, of which EnvHub makes the batch itself"
        )
    if isinstance(made, type):
        return f"the class {made.__qualname__} in place of an env of that class"
    kind = interface(made)
    if takes_turns(made):
        return (
            "a PettingZoo env whose agents take turns (AEC), and whose metadata does not say is_parallelizable; EnvHub "
            "hosts parallel envs: return parallel_env(...) in place of env(...), or "
            "pettingzoo.utils.conversions.turn_based_aec_to_parallel(env)"
        )
    missing = [f"`{name}`" for name in _PARTS[kind] if not hasattr(made, name)]
    if missing:
        return f"{brief(made, 100)}, which is no {kind}: it has no {', '.join(missing)}"
    for name in ("observation_space", "action_space") if kind == GYMNASIUM else ():
        space = getattr(made, name)
        if not is_like_space(space):
            return f"{brief(made, 100)}, whose {name} is {brief(space, 60)} and no space of gymnasium.spaces"
    return ""


def pickled(spec: Any) -> bytes:
    """A registry entry without its callables, and those, each pickled, equal in all processes; raises ``Exception``."""
    entry_points = {name: getattr(spec, name, None) for name in ("entry_point", "vector_entry_point")}
    callables = {name: each for name, each in entry_points.items() if callable(each)}
    if callables:
        from envhub.values import pickling

        plain = copy.copy(spec)
        for name in callables:
            setattr(plain, name, None)
        return pickling.dumps((plain, {name: pickling.dumps(each) for name, each in callables.items()}))
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.fast = True  # no references to equal parts: they are one object in some processes and two in others
    pickler.dump((spec, {}))
    return buffer.getvalue()
