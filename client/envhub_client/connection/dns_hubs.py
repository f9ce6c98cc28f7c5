"""Hubs at all addresses of a name in DNS, such as a headless Service of Kubernetes: ``dns://NAME:PORT``."""

from __future__ import annotations

import contextlib
import socket

from envhub.errors import AddressError, HubUnreachable
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub.transport.address import Address
from envhub.transport.keys import quoted

_SCHEME = "dns://"
_SHOWN = 10  # hubs in one error


def place_of(hub: str | Secret[str]) -> Address | None:
    """The name and port of ``dns://NAME:PORT``; None for any other address.

    Raises:
        AddressError: they are no host and no port.
    """
    if not isinstance(hub, str) or not hub.strip().casefold().startswith(_SCHEME):
        return None
    address = f"tcp://{hub.strip()[len(_SCHEME) :]}"
    try:
        addresses.parse(address)
    except AddressError as error:
        raise AddressError(f"{quoted(hub)} names no hubs; write {_SCHEME}NAME:PORT") from error
    return addresses.parse_hub(address)


def places(place: Address) -> list[str]:
    """``HOST:PORT`` of each hub that the name stands for now.

    HOST is the hub's own name, which it keeps as it moves, or its IP address.

    Raises:
        HubUnreachable: it has no address.
    """
    try:
        answers = socket.getaddrinfo(place.host.strip("[]"), place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HubUnreachable(
            f"{_SCHEME}{place.host}:{place.port}: the name has no address ({error}); see that a hub behind it is ready"
        ) from error
    # A host with addresses of both families is one hub.
    family = min(each[0] for each in answers)
    return sorted({f"{_host(str(each[4][0]), family)}:{place.port}" for each in answers if each[0] == family})


def lone(place: Address) -> str:
    """``HOST:PORT`` of the one hub that the name stands for now.

    Raises:
        AddressError: it stands for several.
        HubUnreachable: as of ``places``.
    """
    hubs = places(place)
    if len(hubs) > 1:
        raise AddressError(
            f"{_SCHEME}{place.host}:{place.port} stands for {len(hubs)} hubs ({', '.join(hubs[:_SHOWN])}), and one "
            "connection goes to one hub: name one of them"
        )
    return hubs[0]


def _host(ip: str, family: socket.AddressFamily) -> str:
    """The name of the host with this address, if it is of this host alone; else the address."""
    if family == socket.AF_INET6:  # for which ZeroMQ resolves no names
        return f"[{ip}]"
    with contextlib.suppress(OSError, UnicodeError):
        name = socket.getnameinfo((ip, 0), socket.NI_NAMEREQD)[0]
        if {each[4][0] for each in socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)} == {ip}:
            return name
    return ip
