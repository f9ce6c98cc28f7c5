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
        text = _kept(text)
    if isinstance(text, str) and text.startswith("ssh://"):
        text = ssh_tunnel.forwarded(text)
    return addresses.parse_hub(text)


def kept_now(name: str) -> Address | None:
    """The address that is kept under this name by now; None where this is no name, or the hub is reached by ssh.

    Raises:
        AddressError: there is none any more.
        KeysError: its file can be read by others.
    """
    if not NAME.fullmatch(name) or (text := _kept(name)).startswith("ssh://"):
        return None
    return addresses.parse_hub(text)


def _kept(name: str) -> str:
    path = _folder() / name
    if not path.exists():
        known = ", ".join(names()) or "none yet"
        raise AddressError(f"no hub is known as {name!r} (known: {known}); `envhub login` keeps the address of one")
    return read_secret(path)


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
        write_secret(path, text_of(sockets.new_key_pair()[1]), replace=new)
    return text_of(sockets.public_key(key_of(read_secret(path))))


def with_own_key(text: str) -> str:
    """The address; one that has the hub's public key only, with this user's own key.

    Raises:
        AddressError: it is no address.
        KeysError: there is no own key.
    """
    head, _, place = text.rpartition("@")
    if len(head) == len("envhub://") + KEY_TEXT_CHARS:
        if not _own_key().exists():
            raise KeysError("this address is for a key of one's own, and there is none here: run `envhub keygen` first")
        text = f"envhub://{text_of(key_of(head[-KEY_TEXT_CHARS:]) + key_of(read_secret(_own_key())))}@{place}"
    ssh_tunnel.parse(text) if text.startswith("ssh://") else addresses.parse_hub(text)
    return text


def name_of(text: str) -> str:
    """The name under which an address is kept where none is given: its host's.

    Raises:
        AddressError: that is no name.
    """
    by_ssh = text.startswith("ssh://")
    host = ssh_tunnel.parse(text)[0].rpartition("@")[2] if by_ssh else addresses.parse(text).host
    if not NAME.fullmatch(host):
        raise AddressError("the address has no host that can be the hub's name; give it one: envhub login NAME")
    return host


def keeps_another(name: str, text: str) -> bool:
    """Whether the hub that is kept under this name has another address, or another key of its own, than this one.

    Raises:
        KeysError: its file can be read by others.
    """
    path = _folder() / name
    if not path.exists() or (kept := read_secret(path)) == text:
        return False
    try:
        old, new = addresses.parse(kept), addresses.parse(text)
    except AddressError:  # by ssh, whose place is the whole text
        return True
    same_key = old.keys is None or (new.keys is not None and new.keys.server == old.keys.server)
    return old.text != new.text or not same_key


def keep(name: str, text: str) -> None:
    """Keep an address under a name; an earlier one of this name is replaced.

    Raises:
        AddressError: it is no name.
        KeysError: the file cannot be written.
    """
    check_name(name)
    write_secret(_folder() / name, text, replace=True)


def check_name(name: str) -> None:
    """Check that a hub can have this name.

    Raises:
        AddressError: it cannot.
    """
    if not NAME.fullmatch(name):
        raise AddressError(f"{name!r} is no name for a hub: letters, digits, dots, dashes and underscores, at most 64")


def _own_key() -> Path:
    return config_folder() / "client.key"


def _folder() -> Path:
    return config_folder() / "hubs"
