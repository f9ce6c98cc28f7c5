"""Recipe of a hub's env for readers of its episodes."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from envhub.registration import REMOTE
from envhub_client.session.specs import own_spec


def environment(envs: VectorEnv[Any, Any, Any]) -> EnvSpec | None:
    """Spec by which one env of ``envs`` can be made here; None if it cannot be written down.

    It is the env's own spec if the envs are this program's own, or if its id is registered in this program, too, and it
    has no arguments but those that this program knows; else it is an env of the same hub, by ``EnvHub/Remote-v0``.
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
