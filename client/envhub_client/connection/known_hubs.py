"""Hubs by name: the addresses, with keys, that ``envhub login`` keeps for this user.

Each is a file of the user's alone, ``hubs/NAME`` in the folder of ``envhub.transport.keys.config_folder``, so that no
program, notebook or command line has a secret in it.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from envhub.errors import AddressError, KeysError, only_linux
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub.transport import sockets
from envhub.transport.address import ENVIRONMENT_VARIABLE, Address
from envhub.transport.keys import (
    KEY_TEXT_CHARS,
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

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def resolve(hub: str | Secret[str]) -> Address:
    """The address that ``hub`` is, or that is kept under this name; of ``ssh://HOST`` the end of a tunnel there.

    An address whose keys were left out where it was written down has those that this user keeps for its place. That
    of ``ray://FLEET`` is the address of the one hub of the fleet, and that of ``dns://NAME:PORT`` the address of the
    one hub that NAME leads to.

    Raises:
        AddressError: it is no address, and no hub of this name is known; or the name stands for several hubs, or this
            system cannot use the address.
        HubUnreachable: ssh does not get there, or the name stands for no hub that serves.
        KeysError: its file can be read by others.
    """
    if isinstance(hub, str) and NAME.fullmatch(hub):
        return _from_file(hub)
    if isinstance(hub, str) and (place := addresses.without_keys(hub)):
        return _with_kept_keys(place) or addresses.parse_hub(hub)
    return _reached(hub)


def _reached(address: str | Secret[str]) -> Address:
    if isinstance(address, str) and address.strip().casefold().startswith("dns://"):
        address = _at_dns_name(address)
    if isinstance(address, str) and address.strip().casefold().startswith("ray:"):
        address = _of_ray(address)
    if isinstance(address, str) and address.startswith("ssh://"):
        if sys.platform == "win32":
            raise AddressError(only_linux("an ssh:// address"))
        from envhub_client.connection import ssh_tunnel

        address = ssh_tunnel.forwarded(address)
    hub = addresses.parse_hub(address)
    if hub.is_ipc and sys.platform == "win32":
        raise AddressError(only_linux(f"the address {hub.text}"))
    return hub


def _of_ray(hub: str) -> str | Secret[str]:
    """The address of the one hub of a fleet on Ray; errors as of ``resolve``."""
    from envhub_client.connection import ray_hubs

    fleet = ray_hubs.fleet_of(hub)
    return ray_hubs.lone(hub if fleet is None else fleet)


def _parse_ssh(place: str) -> tuple[str, str | None, str | None]:
    from envhub_client.connection import ssh_tunnel

    return ssh_tunnel.parse(place)


def _at_dns_name(hub: str) -> str | Secret[str]:
    """The address of the one hub that ``dns://NAME:PORT`` stands for; errors as of ``resolve``."""
    from envhub_client.connection import dns_hubs

    place = dns_hubs.place_of(hub)
    assert place is not None
    return address_with_keys_of(place, dns_hubs.lone(place))


def _from_file(name: str) -> Address:
    """The address that is kept under this name; errors as of ``resolve``."""
    kept = _kept(name)
    try:
        return _reached(kept)
    except AddressError as error:
        raise AddressError(f"{_folder() / name}: {error}") from error


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
        """For a message: where the key, or the address with it, is kept."""
        return f"kept as {self.name!r} in {_folder() / self.name}" if self.name else f"in {ENVIRONMENT_VARIABLE}"

    @property
    def remedy(self) -> str:
        """For a message: how to replace the key by that of an address that the hub's operator gives."""
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
    """The address that is kept under this name by now; None where this is no name, or the hub is reached by ssh.

    Raises:
        AddressError: there is none any more.
        KeysError: its file can be read by others.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None
    kept = _kept(name)
    return None if isinstance(kept, str) and kept.startswith("ssh://") else addresses.parse_hub(kept)


def _kept(name: str) -> str | Secret[str]:
    """The address that is kept under this name; one with keys as a secret."""
    path = _folder() / name
    if not path.exists():
        all_names = ", ".join(names()) or "none yet"
        raise AddressError(
            f"no hub is known as {quoted(name)} (known: {all_names}); `envhub login` keeps the address of one"
        )
    kept: str | Secret[str] = addresses.guarded(read_private(path))
    return kept


def names() -> list[str]:
    """The names of the hubs that are known."""
    folder = _folder()
    return sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name)) if folder.is_dir() else []


def make_own_key(new: bool = False) -> str:
    """Make this user's own secret key, if there is none, or with ``new`` in any case; returns the public one, as text.

    Addresses that are kept have the key with which they were kept.

    Raises:
        KeysError: its file cannot be written, or can be read by others.
    """
    path = _own_key()
    if new or not path.exists():
        write_secret(path, secret_text_of(sockets.new_key_pair()[1]), replace=new)
    return text_of(sockets.public_key(secret_key_of(read_secret(path))))


def with_own_key(address: str | Secret[str]) -> str | Secret[str]:
    """The address; one that has the hub's public key only, with this user's own key.

    Raises:
        AddressError: it is no address.
        KeysError: there is no own key.
    """
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
    """The address of the hub at ``HOST:PORT`` with these keys."""
    return Secret(f"envhub://{token_of(keys).reveal_secret()}@{place}")


def name_of(address: str | Secret[str]) -> str:
    """The name under which an address is kept where none is given: its host's.

    Raises:
        AddressError: that is no name.
    """
    if isinstance(address, str) and address.startswith("ssh://"):
        host = _parse_ssh(address)[0].rpartition("@")[2]
    else:
        host = addresses.parse(address).host
    if not NAME.fullmatch(host):
        raise AddressError("the address has no host that can be the hub's name; give it one: envhub login NAME")
    return host


def keeps_another(name: str, address: str | Secret[str]) -> bool:
    """True if the hub that is kept under this name has another address, or another key of its own, than this one.

    Raises:
        KeysError: its file can be read by others.
    """
    if not (_folder() / name).exists() or (kept := _kept(name)) == address:
        return False
    try:
        old, new = addresses.parse(kept), addresses.parse(address)
    except AddressError:  # by ssh, whose place is the whole text
        return True
    same_key = old.keys is None or (new.keys is not None and new.keys.server == old.keys.server)
    return old.text != new.text or not same_key


def keep(name: str, address: str | Secret[str]) -> None:
    """Keep an address under a name; an earlier one of this name is replaced.

    Raises:
        AddressError: it is no name.
        KeysError: the file cannot be written.
    """
    check_name(name)
    write_secret(_folder() / name, address, replace=True)


def forget(name: str) -> None:
    """Remove the address, with its key, that is kept under a name.

    Raises:
        AddressError: no hub is kept under it.
        KeysError: the file cannot be removed.
    """
    check_name(name)
    try:
        (_folder() / name).unlink()
    except FileNotFoundError as error:
        raise AddressError(f"no hub is kept as {quoted(name)}; `envhub ls` lists the names") from error
    except OSError as error:
        raise KeysError(f"{_folder() / name} cannot be removed: {error.strerror}") from error


def check_name(name: str) -> None:
    """Check that a hub can have this name.

    Raises:
        AddressError: it cannot.
    """
    if not NAME.fullmatch(name):
        raise AddressError(
            f"{quoted(name)} is no name for a hub: letters, digits, dots, dashes and underscores, at most 64"
        )


def _own_key() -> Path:
    return config_folder() / "client.key"


def _folder() -> Path:
    return config_folder() / "hubs"
