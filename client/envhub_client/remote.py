"""The entry points of ``EnvHub/Remote-v0``, which ``envhub`` registers with Gymnasium."""

from __future__ import annotations

from typing import Any

from envhub.errors import AddressError
from envhub.secret import Secret
from envhub.transport.address import guarded
from envhub_client import make as making
from envhub_client.envs.single_env import HubEnv
from envhub_client.envs.vector_env import HubVectorEnv


def make(env_id: str, url: str | None = None, hub: str | None = None, **kwargs: Any) -> HubEnv:
    """One env of the hub at ``url``, or at ``hub``, which says the same; otherwise as ``envhub.make``."""
    return making.make(env_id, hub=_without_secret(url or hub), **kwargs)


def make_vec(num_envs: int, env_id: str, url: str | None = None, hub: str | None = None, **kwargs: Any) -> HubVectorEnv:
    """``num_envs`` envs of the hub at ``url``, or at ``hub``; otherwise as ``envhub.make_vec``."""
    return making.make_vec(env_id, num_envs, hub=_without_secret(url or hub), **kwargs)


def _without_secret(url: str | None) -> str | None:
    """The url, which Gymnasium keeps in the spec."""
    if isinstance(guarded(url), Secret):
        raise AddressError("a spec would keep the key in this url: run `envhub login`, and give the hub's name as url")
    return url
