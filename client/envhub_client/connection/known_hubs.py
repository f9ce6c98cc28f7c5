"""Hubs by name: the addresses, with keys, that ``envhub login`` keeps for this user.

Each is a file of the user's alone, ``hubs/NAME`` in the folder of ``envhub.transport.keys.config_folder``, so that no
program, notebook or command line has a secret in it.
"""

from __future__ import annotations

import re
from pathlib import Path

from envhub.errors import AddressError, KeysError
from envhub.transport import address as addresses
from envhub.transport import sockets
from envhub.transport.address import Address
from envhub.transport.keys import KEY_TEXT_CHARS, config_folder, key_of, read_secret, text_of, write_secret
from envhub_client.connection import ssh_tunnel

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def resolve(text: str) -> Address:
    """The address that ``text`` is, or that is kept under this name; of ``ssh://HOST`` the end of a tunnel there.

    Raises:
        AddressError: it is no address, and no hub of this name is known.
        HubUnreachable: ssh does not get there.
        KeysError: its file can be read by others.
    """
    if isinstance(text, str) and NAME.fullmatch(text):
        path = _folder() / text
        if not path.exists():
            known = ", ".join(names()) or "none yet"
            raise AddressError(f"no hub is known as {text!r} (known: {known}); `envhub login` keeps the address of one")
        text = read_secret(path)
    if isinstance(text, str) and text.startswith("ssh://"):
        text = ssh_tunnel.forwarded(text)
    return addresses.parse(text)


def names() -> list[str]:
    """The names of the hubs that are known."""
    folder = _folder()
    return sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name)) if folder.is_dir() else []


def make_own_key() -> str:
    """Make this user's own secret key, if there is none; returns the public one, as text.

    Raises:
        KeysError: its file cannot be written, or can be read by others.
    """
    path = _own_key()
    if not path.exists():
        write_secret(path, text_of(sockets.new_key_pair()[1]))
    return text_of(sockets.public_key(key_of(read_secret(path))))


def keep(name: str | None, text: str) -> str:
    """Keep an address under a name; an earlier one of this name is replaced. Returns the name.

    Where the address has the hub's public key only, this user's own key is added.

    Args:
        name: the host's where it is None.
        text: the address.

    Raises:
        AddressError: it is no address, or no name.
        KeysError: the file cannot be written, or there is no own key.
    """
    text = text.strip()
    head, _, place = text.rpartition("@")
    if len(head) == len("envhub://") + KEY_TEXT_CHARS:
        if not _own_key().exists():
            raise KeysError("this address is for a key of one's own, and there is none here: run `envhub keygen` first")
        text = f"envhub://{text_of(key_of(head[-KEY_TEXT_CHARS:]) + key_of(read_secret(_own_key())))}@{place}"
    if not ssh_tunnel.PLACE.fullmatch(text):
        addresses.parse(text)
    name = name or place.rpartition(":")[0]
    if not NAME.fullmatch(name):
        raise AddressError(f"{name!r} is no name for a hub: letters, digits, dots, dashes and underscores, at most 64")
    write_secret(_folder() / name, text, replace=True)
    return name


def _own_key() -> Path:
    return config_folder() / "client.key"


def _folder() -> Path:
    return config_folder() / "hubs"
