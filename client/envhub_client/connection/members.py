"""The hubs that a name stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from envhub.errors import AddressError
from envhub.fleet.names import hub_name
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub_client.connection import dns_hubs, known_hubs, ray_hubs


class Member(NamedTuple):
    """A hub of a fleet.

    Attributes:
        name: by which the fleet knows it, also when it comes back at another address.
        address: to connect to, with keys where the hub wants them.
    """

    name: str
    address: str | Secret[str]


def members(hub: str | Secret[str]) -> tuple[Member, ...]:
    """The hubs that ``hub`` stands for now, by name.

    ``dns://NAME:PORT`` stands for those at the name's addresses, ``ray://FLEET`` for those of the fleet that serve, and
    any other address or name for one hub. Hubs may come and go between two calls.

    Raises:
        AddressError: NAME is no host, or there is no such fleet.
        HubUnreachable: NAME has no address, or no hub of the fleet serves.
    """
    if (place := dns_hubs.place_of(hub)) is not None:
        return tuple(Member(each, known_hubs.address_with_keys_of(place, each)) for each in dns_hubs.places(place))
    if (fleet := ray_hubs.fleet_of(hub)) is not None:
        return tuple(Member(hub_name(fleet, index), address) for index, address in ray_hubs.serving(fleet).items())
    address = addresses.guarded(hub)
    return (Member(addresses.written(address), address),)


def all_members(hubs: str | Secret[str] | Sequence[str | Secret[str]]) -> tuple[Member, ...]:
    """The hubs that a name or each of several names stands for now, in their order; errors as for ``members``.

    Raises:
        AddressError: a hub is named twice, or none is named.
    """
    named = (hubs,) if isinstance(hubs, (str, Secret)) else hubs
    chosen = [member for hub in named for member in members(hub)]
    if not chosen:
        raise AddressError("hub=[] names no hub")
    if twice := [member.name for index, member in enumerate(chosen) if member in chosen[:index]]:
        raise AddressError(f"the hub {min(twice)!r} is named twice: each hub has its rows in one session")
    return tuple(chosen)


def stands_for_several(hubs: str | Secret[str] | Sequence[str | Secret[str]]) -> bool:
    """True if this may stand for several hubs: a list, a DNS name, a fleet on Ray."""
    named = hubs if isinstance(hubs, (list, tuple)) else (hubs,)
    kinds = dns_hubs.place_of, ray_hubs.fleet_of
    return len(named) > 1 or any(kind(hub) is not None for hub in named for kind in kinds)
