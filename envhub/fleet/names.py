"""Names of fleets, and of the actors of their hubs."""

from __future__ import annotations

import re

from envhub.errors import AddressError
from envhub.transport.keys import shown

NAMESPACE = "envhub"  # of Ray, so that programs in any namespace have the same fleets
SCHEME = "ray://"
HUBS_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,55}")  # a hub's name, with its number, has 64 characters


def check_fleet_name(name: str) -> None:
    """Check that a fleet can have this name.

    Raises:
        AddressError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise AddressError(
            f"{shown(name)} is no name for a fleet: letters, digits, dots, dashes and underscores, at most 56"
        )


def actor_name(fleet: str, index: int) -> str:
    """Return the name of the actor that keeps this hub."""
    return f"envhub:{fleet}:{index}"


def hub_name(fleet: str, index: int) -> str:
    """Return the name of the hub of this number."""
    return f"{fleet}/{index}"


def index_of(actor: str, fleet: str) -> int | None:
    """Return the number of the hub that this actor keeps; None if it keeps no hub of the fleet."""
    prefix, _, index = actor.rpartition(":")
    return int(index) if prefix == f"envhub:{fleet}" and index.isdecimal() else None


def fleet_of(actor: str) -> str | None:
    """Return the fleet of this actor; None if it keeps no hub."""
    parts = actor.split(":")
    return parts[1] if len(parts) == 3 and parts[0] == "envhub" and parts[2].isdecimal() else None
