"""Addresses that stand for several hubs: ``dns://NAME:PORT``, such as of a headless Service of Kubernetes, and ``ray://FLEET``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Mapping

from envhub.errors import AddressError, HubUnreachable, only_linux, shortened
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub.transport.address import Address, check_fleet_name, quoted
from envhub.transport.socket_file import open_socket_file

_DNS = "dns://"
_SHOWN = 10  # hubs in one error


def dns_name(hub: str | Secret[str]) -> Address | None:
    """The name and port of ``dns://NAME:PORT``; None for any other address."""
    if not isinstance(hub, str) or not hub.strip().casefold().startswith(_DNS):
        return None
    address = f"tcp://{hub.strip()[len(_DNS) :]}"
    try:
        addresses.parse(address)
    except AddressError as error:
        raise AddressError(f"{quoted(hub)} names no hubs; write {_DNS}NAME:PORT") from error
    return addresses.parse_hub(address)


def dns_hubs(place: Address) -> list[str]:
    """``HOST:PORT`` of each hub that the name stands for now.

    HOST is the hub's own name, which it keeps as it moves, or its IP address.
    """
    try:
        answers = socket.getaddrinfo(place.host.strip("[]"), place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HubUnreachable(
            f"{_DNS}{place.host}:{place.port}: the name has no address ({error}); see that a hub behind it is ready"
        ) from error
    # A host with addresses of both families is one hub.
    family = min(each[0] for each in answers)
    return sorted({f"{_host(str(each[4][0]), family)}:{place.port}" for each in answers if each[0] == family})


def only_dns_hub(place: Address) -> str:
    """``HOST:PORT`` of the one hub that the name stands for now."""
    hubs = dns_hubs(place)
    if len(hubs) > 1:
        raise AddressError(
            f"{_DNS}{place.host}:{place.port} stands for {len(hubs)} hubs ({', '.join(hubs[:_SHOWN])}), and one "
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


LOOKUP_TIMEOUT_S = 60.0  # for a program to start and to connect to Ray
_RAY = "ray://"
_WHY_CHARS_MAX = 500


def fleet_of(hub: str | Secret[str]) -> str | None:
    """The name of the fleet that ``ray://NAME`` names; None for any other address."""
    if not isinstance(hub, str) or not hub.strip().casefold().startswith(_RAY):
        return None
    return hub.strip()[len(_RAY) :]


def ray_hubs(fleet: str) -> dict[int, str | Secret[str]]:
    """The addresses of the hubs of a fleet that serve now, by number, each as this program reaches it best.

    A program that is connected to Ray asks the actors of the hubs. For any other, a process does so that connects to
    the cluster of ``RAY_ADDRESS``, else to that of this machine.
    """
    check_fleet_name(fleet)
    if sys.platform != "linux":
        raise AddressError(only_linux(f"ray://{fleet}"))
    if importlib.util.find_spec("ray") is None:
        raise AddressError(
            f"ray://{fleet} needs Ray, which is not installed here: pip install 'envhub-rl[ray]', or name the hubs "
            "by their addresses, in a list"
        )
    ray = sys.modules.get("ray")  # where it is not imported, it takes a second, and the program is not connected
    access = _asked(fleet) if ray is not None and ray.is_initialized() else _looked_up(fleet)
    if not access:
        raise HubUnreachable(f"no hub of the fleet {fleet!r} serves now; Fleet({fleet!r}).ls() says what they do")
    return {index: _reached(*each) for index, each in sorted(access.items())}


def only_ray_hub(fleet: str) -> str | Secret[str]:
    hubs = ray_hubs(fleet)
    if len(hubs) > 1:
        raise AddressError(
            f"the fleet {fleet!r} has {len(hubs)} hubs, and one connection goes to one hub; "
            f"`envhub fleet ls ray://{fleet}` lists their addresses"
        )
    return hubs.popitem()[1]


def _asked(fleet: str) -> Mapping[int, tuple[str, str]]:
    from envhub.fleet import Fleet

    return Fleet(fleet).access()


def _looked_up(fleet: str) -> Mapping[int, tuple[str, str]]:
    program = [sys.executable, "-m", "envhub.fleet.fleet", fleet]
    try:
        ran = subprocess.run(
            program, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOKUP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise HubUnreachable(f"Ray has not answered for {error.timeout:g} s about the fleet {fleet!r}") from None
    if ran.returncode:
        why = shortened(ran.stderr.strip().rpartition("\n")[2], _WHY_CHARS_MAX)
        raise HubUnreachable(f"the fleet {fleet!r} is not found by the cluster of RAY_ADDRESS or this machine: {why}")
    return {int(index): tuple(access) for index, access in json.loads(ran.stdout).items()}


def _reached(tcp: str, ipc: str) -> str | Secret[str]:
    """The socket of a hub on this machine, if this user may open it, else its tcp address with the key."""
    try:
        open_socket_file(ipc.removeprefix("ipc://")).close()
    except OSError:
        return Secret(tcp)
    return ipc
