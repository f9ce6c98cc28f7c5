"""Hubs of a fleet on Ray, which ``ray://NAME`` names."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping

from envhub.errors import AddressError, HubUnreachable, only_linux, shortened
from envhub.fleet.names import check_fleet_name
from envhub.secret import Secret
from envhub.transport.socket_file import open_socket_file

LOOKUP_TIMEOUT_S = 60.0  # for a program to start and to connect to Ray
_SCHEME = "ray://"
_WHY_CHARS_MAX = 500


def fleet_of(hub: str | Secret[str]) -> str | None:
    """The name of the fleet that ``ray://NAME`` names; None for any other address."""
    if not isinstance(hub, str) or not hub.strip().casefold().startswith(_SCHEME):
        return None
    return hub.strip()[len(_SCHEME) :]


def serving(fleet: str) -> dict[int, str | Secret[str]]:
    """The addresses of the hubs of a fleet that serve now, by number, each as this program reaches it best.

    A program that is connected to Ray asks the actors of the hubs. For any other, a process does so that connects to
    the cluster of ``RAY_ADDRESS``, else to that of this machine.

    Raises:
        AddressError: there is no such fleet, Ray is not installed, or this is not Linux.
        HubUnreachable: Ray is out of reach, or no hub of the fleet serves now.
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


def lone(fleet: str) -> str | Secret[str]:
    """The address of the one hub of a fleet.

    Raises:
        AddressError: it has several; or as of ``serving``.
        HubUnreachable: as of ``serving``.
    """
    hubs = serving(fleet)
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
