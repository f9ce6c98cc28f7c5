"""Fleets of hubs that Ray starts and keeps; needs ``pip install "envhub-rl[ray]"``."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from envhub.errors import HubUnreachable, only_linux

if TYPE_CHECKING:
    from envhub.fleet.fleet import Fleet, FleetHub

__all__ = ["Fleet", "FleetHub"]


def __getattr__(name: str) -> Any:
    """Import the public classes when they are first used.

    Raises:
        HubUnreachable: this system starts no hubs.
        ModuleNotFoundError: Ray is not installed; the text names the extra.
    """
    if name not in __all__:
        raise AttributeError(f"module 'envhub.fleet' has no attribute {name!r}")
    if sys.platform != "linux":
        raise HubUnreachable(only_linux("envhub.fleet"))
    from envhub_client.frameworks import needs

    with needs("ray", "envhub.fleet"):
        return getattr(import_module("envhub.fleet.fleet"), name)
