"""Hubs at all addresses of a name in DNS, such as a headless Service of Kubernetes: ``dns://NAME:PORT``."""

from __future__ import annotations

import contextlib
import socket

from envhub.errors import HubUnreachable
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub.transport.address import Address

_SCHEME = "dns://"


def place_of(hub: str | Secret[str]) -> Address | None:
    """The name and port of ``dns://NAME:PORT``; None for any other address.

    Raises:
        AddressError: they are no host and no port.
    """
    if not isinstance(hub, str) or not hub.strip().casefold().startswith(_SCHEME):
        return None
    return addresses.parse_hub(f"tcp://{hub.strip()[len(_SCHEME) :]}")


def hosts(place: Address) -> list[str]:
    """The hosts that the name stands for now: by their own names, which they keep as they move, or by IP addresses.

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
    return sorted({_host(str(each[4][0]), family) for each in answers if each[0] == family})


def _host(ip: str, family: socket.AddressFamily) -> str:
    """The name of the host with this address, if it is of this host alone; else the address."""
    if family == socket.AF_INET6:  # for which ZeroMQ resolves no names
        return f"[{ip}]"
    with contextlib.suppress(OSError, UnicodeError):
        name = socket.getnameinfo((ip, 0), socket.NI_NAMEREQD)[0]
        if {each[4][0] for each in socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)} == {ip}:
            return name
    return ip
