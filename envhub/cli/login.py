"""Commands for the keys of this user: ``keygen``, ``login`` and ``logout``."""

from __future__ import annotations

import getpass
import sys

from envhub.cli.terminal import EXIT_FAILED, end, errors_in_a_line, print_error, print_line, with_secrets


def keygen(*, new: bool = False) -> None:
    """Make this user's own key, and print its public half for ``envhub keys add --public``; the secret stays here.

    Parameters
    ----------
    new
        Replace the key that exists. The hubs that are kept get the old one until the next ``envhub login``.
    """
    from envhub_client.connection.known_hubs import make_own_key

    with with_secrets("keygen"):
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

    from envhub.errors import HubUnreachable
    from envhub.transport.address import guarded

    with with_secrets("login"):
        text = ""
        if sys.stdin is not None:  # it is None where the descriptor is closed
            text = getpass.getpass("envhub:// address: ") if sys.stdin.isatty() else sys.stdin.readline()
        if not text.strip():
            end("login", "no address was given: paste the one that `envhub keys add` has printed", EXIT_FAILED)
        address = known_hubs.with_own_key(guarded(text.strip()))
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


def logout(name: str) -> None:
    """Remove the address of a hub, with its key, that ``envhub login`` keeps; the hub still admits the key.

    Parameters
    ----------
    name
        Name of the hub.
    """
    from envhub_client.connection import known_hubs

    with errors_in_a_line("logout"):
        known_hubs.forget(name)
