"""Hubs by name: the addresses, with keys, that ``envhub login`` keeps for this user.

Each is a file of the user's alone, ``hubs/NAME`` in the folder ``envhub.transport.address.config_folder()``, so that
no program, notebook or command line has a secret in it.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from envhub.errors import AddressError, KeysError, only_linux
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub.transport import sockets
from envhub.transport.address import (
    ENVIRONMENT_VARIABLE,
    KEY_TEXT_CHARS,
    Address,
    HubKeys,
    config_folder,
    key_of,
    quoted,
    read_private,
    read_secret,
    secret_key_of,
    secret_text_of,
    text_of,
    token_of,
    write_secret,
)
from envhub_client.connection import fleets

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def resolve(hub: str | Secret[str]) -> Address:
    """The address that ``hub`` is, or that is kept under this name; of ``ssh://HOST`` the end of a tunnel there.

    An address whose keys were left out where it was written down has those that this user keeps for its place. That
    of ``ray://FLEET`` is the address of the one hub of the fleet, and that of ``dns://NAME:PORT`` the address of the
    one hub that NAME leads to.
    """
    if isinstance(hub, str) and NAME.fullmatch(hub):
        kept = _kept(hub)
        try:
            return _reached(kept)
        except AddressError as error:
            raise AddressError(f"{_folder() / hub}: {error}") from error
    if isinstance(hub, str) and (place := addresses.without_keys(hub)):
        return _with_kept_keys(place) or addresses.parse_hub(hub)
    return _reached(hub)


def _reached(address: str | Secret[str]) -> Address:
    if isinstance(address, str) and address.strip().casefold().startswith("dns://"):
        place = fleets.dns_name(address)
        assert place is not None
        address = address_with_keys_of(place, fleets.only_dns_hub(place))
    if isinstance(address, str) and address.strip().casefold().startswith("ray:"):
        fleet = fleets.fleet_of(address)
        address = fleets.only_ray_hub(address if fleet is None else fleet)
    if isinstance(address, str) and address.startswith("ssh://"):
        if sys.platform == "win32":
            raise AddressError(only_linux("an ssh:// address"))
        from envhub_client.connection import ssh_tunnel

        address = ssh_tunnel.forwarded(address)
    hub = addresses.parse_hub(address)
    if hub.is_ipc and sys.platform == "win32":
        raise AddressError(only_linux(f"the address {hub.text}"))
    return hub


def _parse_ssh(place: str) -> tuple[str, str | None, str | None]:
    from envhub_client.connection import ssh_tunnel

    return ssh_tunnel.parse(place)


def _with_kept_keys(place: str) -> Address | None:
    """The address at ``HOST:PORT`` for which ``ENVHUB_ADDRESS`` or a kept one has keys; None if there is none."""
    return next((hub for _, hub in _with_keys() if hub.text == f"tcp://{place}"), None)


def _with_keys() -> Iterator[tuple[str, Address]]:
    """The addresses with keys, by the names under which they are kept; that of ``ENVHUB_ADDRESS`` has no name."""
    for name in ["", *names()]:
        with contextlib.suppress(AddressError, KeysError):
            hub = addresses.parse_hub(_kept(name) if name else addresses.of_environment() or "")
            if hub.keys is not None:
                yield name, hub


class KeptKey(NamedTuple):
    """Place of a kept key: under this name, or without a name in ``ENVHUB_ADDRESS``."""

    name: str

    @property
    def place(self) -> str:
        return f"kept as {self.name!r} in {_folder() / self.name}" if self.name else f"in {ENVIRONMENT_VARIABLE}"

    @property
    def remedy(self) -> str:
        if not self.name:
            return f"set {ENVIRONMENT_VARIABLE} to the address that you are given"
        return (
            f"run `envhub login {self.name}` with what you are given; `envhub logout {self.name}` removes what is kept"
        )


def kept_key(target: Address) -> KeptKey | None:
    """Find the place where this address is kept with its keys, or, if it has none, with any; None without one."""
    for name, hub in _with_keys():
        if hub.text == target.text and target.keys in (None, hub.keys):
            return KeptKey(name)
    return None


def kept_now(name: str | Secret[str]) -> Address | None:
    """The address that is kept under this name by now; None where this is no name, or the hub is reached by ssh."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None
    kept = _kept(name)
    return None if isinstance(kept, str) and kept.startswith("ssh://") else addresses.parse_hub(kept)


def _kept(name: str) -> str | Secret[str]:
    path = _folder() / name
    if not path.exists():
        all_names = ", ".join(names()) or "none yet"
        raise AddressError(
            f"no hub is known as {quoted(name)} (known: {all_names}); `envhub login` keeps the address of one"
        )
    kept: str | Secret[str] = addresses.guarded(read_private(path))
    return kept


def names() -> list[str]:
    folder = _folder()
    return sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name)) if folder.is_dir() else []


def make_own_key(new: bool = False) -> str:
    """Make this user's own secret key, if there is none, or with ``new`` in any case; returns the public one, as text.

    Addresses that are kept have the key with which they were kept.
    """
    path = _own_key()
    if new or not path.exists():
        write_secret(path, secret_text_of(sockets.new_key_pair()[1]), replace=new)
    return text_of(sockets.public_key(secret_key_of(read_secret(path))))


def with_own_key(address: str | Secret[str]) -> str | Secret[str]:
    """The address; one that has the hub's public key only, with this user's own key."""
    text = address.reveal_secret() if isinstance(address, Secret) else address
    head, _, place = text.rpartition("@")
    if len(head) == len("envhub://") + KEY_TEXT_CHARS:
        if not _own_key().exists():
            raise KeysError("this address is for a key of one's own, and there is none here: run `envhub keygen` first")
        keys = HubKeys(key_of(head[-KEY_TEXT_CHARS:]), secret_key_of(read_secret(_own_key())))
        address = _with(keys, place)
    _parse_ssh(text) if text.startswith("ssh://") else addresses.parse_hub(address)
    return address


def address_with_keys_of(kept: Address, place: str) -> str | Secret[str]:
    """The address of the hub at ``HOST:PORT``, with the keys that this user keeps for another place, if any."""
    other = _with_kept_keys(kept.text.removeprefix("tcp://"))
    return _with(other.keys, place) if other is not None and other.keys is not None else f"tcp://{place}"


def _with(keys: HubKeys, place: str) -> Secret[str]:
    return Secret(f"envhub://{token_of(keys).reveal_secret()}@{place}")


def name_of(address: str | Secret[str]) -> str:
    """The name under which an address is kept where none is given: its host's."""
    if isinstance(address, str) and address.startswith("ssh://"):
        host = _parse_ssh(address)[0].rpartition("@")[2]
    else:
        host = addresses.parse(address).host
    if not NAME.fullmatch(host):
        raise AddressError("the address has no host that can be the hub's name; give it one: envhub login NAME")
    return host


def keeps_another(name: str, address: str | Secret[str]) -> bool:
    """True if the hub that is kept under this name has another address, or another key of its own, than this one."""
    if not (_folder() / name).exists() or (kept := _kept(name)) == address:
        return False
    try:
        old, new = addresses.parse(kept), addresses.parse(address)
    except AddressError:  # by ssh, whose place is the whole text
        return True
    same_key = old.keys is None or (new.keys is not None and new.keys.server == old.keys.server)
    return old.text != new.text or not same_key


def keep(name: str, address: str | Secret[str]) -> None:
    """Keep an address under a name; an earlier one of this name is replaced."""
    check_name(name)
    write_secret(_folder() / name, address, replace=True)


def forget(name: str) -> None:
    """Remove the address, with its key, that is kept under a name."""
    check_name(name)
    try:
        (_folder() / name).unlink()
    except FileNotFoundError as error:
        raise AddressError(f"no hub is kept as {quoted(name)}; `envhub ls` lists the names") from error
    except OSError as error:
        raise KeysError(f"{_folder() / name} cannot be removed: {error.strerror}") from error


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise AddressError(
            f"{quoted(name)} is no name for a hub: letters, digits, dots, dashes and underscores, at most 64"
        )


def _own_key() -> Path:
    return config_folder() / "client.key"


def _folder() -> Path:
    return config_folder() / "hubs"


class Member(NamedTuple):
    """A hub of a fleet."""

    name: str  # by which the fleet knows it, also when it comes back at another address
    address: str | Secret[str]


def members(hub: str | Secret[str]) -> tuple[Member, ...]:
    """The hubs that ``hub`` stands for now, by name.

    ``dns://NAME:PORT`` stands for those at the name's addresses, ``ray://FLEET`` for those of the fleet that serve, and
    any other address or name for one hub. Hubs may come and go between two calls.
    """
    if (place := fleets.dns_name(hub)) is not None:
        return tuple(Member(each, address_with_keys_of(place, each)) for each in fleets.dns_hubs(place))
    if (fleet := fleets.fleet_of(hub)) is not None:
        return tuple(Member(f"{fleet}/{index}", address) for index, address in fleets.ray_hubs(fleet).items())
    address = addresses.guarded(hub)
    return (Member(addresses.written(address), address),)


def all_members(hubs: str | Secret[str] | Sequence[str | Secret[str]]) -> tuple[Member, ...]:
    """The hubs that a name or each of several names stands for now, in their order; none may be named twice."""
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
    kinds = fleets.dns_name, fleets.fleet_of
    return len(named) > 1 or any(kind(hub) is not None for hub in named for kind in kinds)
