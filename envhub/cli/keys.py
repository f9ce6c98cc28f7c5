"""Commands for keys: the clients that a hub admits (``envhub keys``), and this user's own (``envhub login``)."""

from __future__ import annotations

import getpass
import socket
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from envhub.cli import EXIT_FAILED, end, print_error, print_line
from envhub.cli.commands import KeyText
from envhub.errors import AddressError, HubUnreachable, KeysError
from envhub.process import write_no_core_file
from envhub.transport import sockets
from envhub.transport.address import HubKeys, guarded, key_of, parse_hub, quoted, text_of, token_of

ClientName = Annotated[str, Parameter(help="Name of the client.")]
KeysFolder = Annotated[Path, Parameter(help="Folder of keys, which ``envhub serve --keys`` names.")]


def add(name: str, *, keys: Path, may: str | None = None, at: str | None = None, public: KeyText | None = None) -> None:
    """Admit a client, and print once the address with which it connects; the hub need not be started again.

    Parameters
    ----------
    name
        Name of the client. One that exists gets a second key.
    keys
        Folder of keys, which ``envhub serve --keys`` names; it is made if it does not exist.
    may
        Right of the client: observe, use, deploy (any arguments, and factories), or admin (the sessions of all clients,
        too). A new client has the right to use the hub by default.
    at
        HOST:PORT at which clients reach the hub. By default this machine's name and port 5555.
    public
        Public key of the client's own, which ``envhub keygen`` prints on its machine. By default a key is made here.
    """
    from envhub_server.network.key_folder import KeyFolder

    write_no_core_file()
    host_port = at or f"{socket.gethostname()}:5555"
    if ":" not in host_port:
        raise AddressError(f"--at {quoted(host_port)} has no port; write HOST:PORT, such as simbox:5555")
    parse_hub(f"tcp://{host_port}")  # before a key is admitted with which no client could connect
    folder = KeyFolder(keys)
    server = sockets.public_key(folder.make_secret())
    own, secret = (key_of(public), None) if public else sockets.new_key_pair()
    token = text_of(server) if secret is None else token_of(HubKeys(server, secret)).reveal_secret()
    folder.add(name, own, may)
    try:
        if sys.stdout is None:  # its descriptor is closed
            raise OSError("there is no standard output")
        print(f"envhub://{token}@{host_port}", flush=True)
    except BaseException as error:
        folder.remove(name, own)  # its secret is lost
        if isinstance(error, OSError):
            raise KeysError(f"no key is added, because its address cannot be printed: {error}") from error
        raise
    print_error(f"give this to {name}, who runs `envhub login` and pastes it; it is not shown again")


def list_clients(*, keys: KeysFolder) -> None:
    """List the clients that are admitted, their rights and their public keys."""
    from envhub_server.network.key_folder import KeyFolder

    write_no_core_file()
    if not keys.is_dir():
        raise KeysError(f"there is no folder {keys}; `envhub keys add NAME --keys DIR` makes one")
    folder = KeyFolder(keys)
    names = folder.names()
    problems = folder.passed_over
    for name in names:
        try:
            holder, public_keys = folder.holder(name)
            print(name, holder.right, *map(text_of, public_keys))
        except KeysError as error:
            problems.append(str(error))
    if problems:
        raise KeysError("\n".join(problems))
    if not names:
        print_error(f"no client is admitted; `envhub keys add NAME --keys {keys}` admits one")


def remove(name: ClientName, *, keys: KeysFolder, key: KeyText | None = None) -> None:
    """Remove a client, whose connections end within a second.

    Parameters
    ----------
    key
        Remove only this public key of the client. By default all.
    """
    from envhub_server.network.key_folder import KeyFolder

    write_no_core_file()
    KeyFolder(keys).remove(name, None if key is None else key_of(key))


def keygen(*, new: bool = False) -> None:
    """Make this user's own key, and print its public half for ``envhub keys add --public``; the secret stays here.

    Parameters
    ----------
    new
        Replace the key that exists. The hubs that are kept get the old one until the next ``envhub login``.
    """
    from envhub_client.connection.known_hubs import make_own_key

    write_no_core_file()
    print(make_own_key(new))


def login(name: str | None = None) -> None:
    """Ask for the address of a hub with its key, unseen, and keep it, so that ``hub="NAME"`` is enough from then on.

    Parameters
    ----------
    name
        Name of the hub, by default that of its host. A hub that is kept by a name given here is replaced.
    """
    from envhub_client.client import connect
    from envhub_client.connection import known_hubs

    write_no_core_file()
    text = ""
    if sys.stdin is not None:  # it is None where the descriptor is closed
        text = getpass.getpass("envhub:// address: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not text.strip():
        end("login", "no address was given: paste the one that `envhub keys add` has printed", EXIT_FAILED)
    address = known_hubs.add_own_key(guarded(text.strip()))
    if not name:
        name = known_hubs.name_of(address)
        if known_hubs.keeps_another(name, address):  # whose secret is kept nowhere else
            end("login", f"another hub is kept as {name!r}; give this one a name: envhub login NAME")
    known_hubs.check_name(name)
    try:
        connect(address, timeout=5.0).close()  # nothing is kept of a hub that refuses it
    except HubUnreachable as error:
        print_error(f"no hub answers there now: {error}")
    else:
        print_line("the hub answers")
    known_hubs.keep(name, address)
    print_line(f'kept: hub="{name}"')


def logout(name: Annotated[str, Parameter(help="Name of the hub.")]) -> None:
    """Remove the address of a hub, with its key, that ``envhub login`` keeps; the hub still admits the key."""
    from envhub_client.connection import known_hubs

    known_hubs.forget(name)
