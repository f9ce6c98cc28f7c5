"""Attributes of envs in a hub, for frameworks that ask for methods as for any other attribute."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from envhub_client.envs.vector_env import HubVectorEnv


def attributes(envs: HubVectorEnv, name: str, rows: list[int]) -> Sequence[Any]:
    """The attribute of each of these envs; of a method a function that calls it in the hub.

    Raises:
        Exception: as for ``HubVectorEnv.get_attr``.
    """
    if not any(envs.attr_is_callable(name, rows)):
        return envs.get_attr(name, rows)
    return [functools.partial(call, envs, row, name) for row in rows]


def call(envs: HubVectorEnv, row: int, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the method of one env; errors as for ``HubVectorEnv.call_some``."""
    return envs.call_some([row], name, *args, **kwargs)[0]
