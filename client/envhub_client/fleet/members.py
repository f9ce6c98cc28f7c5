"""The hubs that a name stands for."""

from __future__ import annotations

from typing import NamedTuple

from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub_client.connection import announced_hubs, known_hubs, ray_hubs


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

    Those that are announced in the folder of ``file:///FOLDER``, or that serve of the fleet of ``ray://FLEET``; of any
    other address or name one hub, itself. Hubs may come and go between two calls. A warning names the announcements
    that are left out.

    Raises:
        AddressError: the folder is not given by its path, or other users may write to it; or there is no such fleet.
        HubUnreachable: no hub is announced there, or none of the fleet serves.
        KeysError: a hub there wants a key, and this user has none.
    """
    if (fleet := ray_hubs.fleet_of(hub)) is not None:
        return tuple(Member(f"{fleet}/{index}", address) for index, address in ray_hubs.serving(fleet).items())
    folder = announced_hubs.folder_of(hub)
    if folder is None:
        return (Member(addresses.written(hub), addresses.guarded(hub)),)
    hubs = announced_hubs.present(folder)
    return tuple(Member(each.name, known_hubs.announced_address(each, folder)) for each in hubs)
