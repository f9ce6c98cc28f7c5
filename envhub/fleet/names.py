"""Names of fleets, and of the actors of their hubs."""

from __future__ import annotations

import re

from envhub.errors import AddressError
from envhub.transport.keys import quoted

NAMESPACE = "envhub"  # of Ray, so that programs in any namespace have the same fleets
HUBS_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,55}")  # a hub's name, with its number, has 64 characters
_ACTOR = re.compile(r"envhub:([^:]*):([0-9]+)")


def check_fleet_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise AddressError(
            f"{quoted(name)} is no name for a fleet: letters, digits, dots, dashes and underscores, at most 56"
        )


def actor_name(fleet: str, index: int) -> str:
    return f"envhub:{fleet}:{index}"


def hub_name(fleet: str, index: int) -> str:
    return f"{fleet}/{index}"


def hub_of(actor: str) -> tuple[str, int] | None:
    """Return the fleet and the number of the hub that this actor keeps; None if it keeps none."""
    match = _ACTOR.fullmatch(actor)
    return None if match is None else (match[1], int(match[2]))
