"""Keys that a hub admits, made for a test."""

from __future__ import annotations

from pathlib import Path

from envhub_server.network.key_folder import KeyFolder

import envhub
from envhub.transport import sockets
from envhub.transport.address import HubKeys, token_of


def keys_in(path: Path) -> KeyFolder:
    """A folder of keys with the hub's."""
    folder = KeyFolder(path)
    folder.make_secret()
    return folder


def admitted(keys: KeyFolder, name: str, may: str = "use", **quotas: int) -> str:
    """Admit a new key with these quotas, and return its token."""
    public, secret = sockets.new_key_pair()
    keys.add(name, public, may)
    if quotas:
        path = keys.path / f"clients/{name}.toml"
        lines = [path.read_text(), "[quotas]", *(f"{what} = {most}" for what, most in quotas.items())]
        path.write_text("\n".join(lines))
    return token_of(HubKeys(sockets.public_key(keys.secret()), secret)).reveal_secret()


def address_of(token: str, place: str) -> str:
    """The address with this token of the hub at this tcp address."""
    return f"envhub://{token}@{place.removeprefix('tcp://')}"


def answers(address: str) -> bool:
    """Whether the hub there lets the client in."""
    try:
        envhub.connect(address, timeout=30.0).close()
    except envhub.AccessDenied:
        return False
    return True
