"""The entry points of ``EnvHub/Remote-v0``, see ``envhub.registration``."""

from __future__ import annotations

from typing import Any

from envhub_client import make as making
from envhub_client.envs.single_env import HubEnv
from envhub_client.envs.vector_env import HubVectorEnv


def make(env_id: str, url: str | None = None, **kwargs: Any) -> HubEnv:
    """One env of the hub at ``url``; otherwise as ``envhub.make``."""
    return making.make(env_id, hub=url, **kwargs)


def make_vec(num_envs: int, env_id: str, url: str | None = None, **kwargs: Any) -> HubVectorEnv:
    """``num_envs`` envs of the hub at ``url``; otherwise as ``envhub.make_vec``."""
    return making.make_vec(env_id, num_envs, hub=url, **kwargs)
