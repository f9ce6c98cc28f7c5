"""Hubs that announce themselves in a folder, which ``file:///FOLDER`` names."""

from __future__ import annotations

import logging
import socket
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envhub.errors import AddressError, HubUnreachable, printable
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub.transport.address import Address
from envhub.transport.socket_file import open_socket_file

if TYPE_CHECKING:  # it needs msgspec, which a client of a hub by its address does not load
    from envhub.transport.announcement import Announcement, Skipped

_SKIPPED_SHOWN = 10  # in one warning
_SCHEME = "file:"
_FOLDERS_MAX = 64
_skipped: dict[Path, frozenset[str]] = {}  # by folder, the files that the last look skipped

logger = logging.getLogger("envhub")


def folder_of(hub: str | Secret[str]) -> Path | None:
    """The folder that ``file:///FOLDER``, ``file:FOLDER`` or ``file:~/FOLDER`` names; None for any other address.

    Raises:
        AddressError: it names none of this machine.
    """
    if not isinstance(hub, str) or not hub.strip().casefold().startswith(_SCHEME):
        return None
    path = urllib.parse.unquote(hub.strip()[len(_SCHEME) :])
    if path.startswith("//"):
        host, _, path = path[2:].partition("/")
        path = f"/{path}" if host in ("", "localhost") and path else ""
    try:
        if path and "\0" not in path:
            return Path(path).expanduser().absolute()
    except RuntimeError:  # there is no home
        pass
    raise AddressError(f"{hub!r} names no folder of this machine; write file:///FOLDER, with three slashes")


def announced(folder: Path) -> tuple[list[Announcement], list[Skipped]]:
    """The hubs that are announced in a folder, by name, and the files that are skipped.

    Raises:
        AddressError: other users may write to the folder.
        HubUnreachable: it cannot be read.
    """
    from envhub.transport.announcement import read_folder

    try:
        return read_folder(folder)
    except OSError as error:
        raise HubUnreachable(f"the announcements in {folder} cannot be read: {error.strerror}") from error


def present(folder: Path) -> list[Announcement]:
    """The hubs that are announced in a folder, by name; a warning names the files that are skipped.

    Raises:
        AddressError: other users may write to the folder.
        HubUnreachable: no hub is announced there.
    """
    hubs, skipped = announced(folder)
    _warn(folder, skipped)
    if not hubs:
        raise HubUnreachable(
            f"no hub is announced in {folder}{f' ({_text(skipped)})' if skipped else ''}: "
            f"start hubs with `envhub serve --announce {folder} --bind tcp://*:0 --keys DIR ENV`"
        )
    return hubs


def _warn(folder: Path, skipped: Sequence[Skipped]) -> None:
    """Warn of the files that are skipped, if there is one of which the last look did not know."""
    if len(_skipped) > _FOLDERS_MAX:
        _skipped.clear()
    before, _skipped[folder] = _skipped.get(folder, frozenset()), frozenset(each.file for each in skipped)
    if _skipped[folder] - before:
        logger.warning("announcements in %s are skipped: %s", folder, _text(skipped))


def lone(folder: Path) -> Announcement:
    """The one hub that is announced in a folder.

    Raises:
        AddressError: several are; or as of ``present``.
        HubUnreachable: as of ``present``.
    """
    hubs = present(folder)
    if len(hubs) > 1:
        names = ", ".join(each.name for each in hubs[:_SKIPPED_SHOWN])
        raise AddressError(
            f"{len(hubs)} hubs are announced in {folder} ({names}), and one connection goes to one hub; "
            f"`envhub fleet ls file://{folder}` lists their addresses"
        )
    return hubs[0]


def place_of(hub: Announcement, folder: Path) -> str:
    """The address, without keys, by which this machine reaches an announced hub best.

    Raises:
        HubUnreachable: it has none for this machine.
    """
    places: list[str] = [*(hub.local_addresses if hub.is_of_this_machine() else ()), *hub.addresses]
    for place in places:
        if _is_reached(addresses.parse(place), hub.network_namespace):
            return place
    given = ", ".join((*hub.addresses, *hub.local_addresses)) or "none"
    raise HubUnreachable(
        f"the hub {hub.name!r} of the machine {hub.host!r}, announced in {folder}, has no address for this machine "
        f"({given}): bind it to tcp://*:0, and see that its host name resolves here"
    )


def _is_reached(address: Address, network_namespace: int) -> bool:
    """True if an announced address may lead to its hub from this process."""
    from envhub.transport.announcement import namespace

    try:
        if address.is_ipc:
            open_socket_file(address.path).close()
        elif address.is_loopback:
            return network_namespace == namespace("net")
        else:
            socket.getaddrinfo(address.host.strip("[]"), address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return True


def _text(skipped: Sequence[Skipped]) -> str:
    """The files that are skipped, each with the reason."""
    shown = "; ".join(printable(f"{each.file}: {each.why}") for each in skipped[:_SKIPPED_SHOWN])
    return f"{shown}; and {len(skipped) - _SKIPPED_SHOWN} more" if len(skipped) > _SKIPPED_SHOWN else shown
