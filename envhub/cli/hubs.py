"""Commands that ask hubs: ``health``, ``ls`` and ``envs``."""

from __future__ import annotations

import sys
from typing import Any

from envhub.cli.health import TIMEOUT_S, check
from envhub.cli.parameters import Seconds, console, errors
from envhub.cli.terminal import EXIT_FAILED, end, print_line


def health(address: str | None = None, *, timeout: Seconds = TIMEOUT_S) -> None:
    """Ask a hub whether it serves; exit with 0 if it does, 1 if it does not answer or is shutting down.

    Parameters
    ----------
    address
        Address or name of the hub; without it ENVHUB_ADDRESS, else where ``envhub serve`` listens by default.
    timeout
        Seconds to wait for the answer.
    """
    check(address, timeout)


def ls() -> None:
    """List the hubs that this user can name, the one of ENVHUB_ADDRESS among them, and whether they answer."""
    from concurrent.futures import ThreadPoolExecutor

    from envhub_client.client import connect
    from envhub_client.connection import known_hubs

    from envhub.errors import EnvHubError
    from envhub.transport import address

    def state(hub: Any) -> str:
        try:
            with connect(hub, timeout=2.0) as client:
                return str(client.health()["status"])
        except EnvHubError as error:
            return str(error)

    try:
        of_environment = address.of_environment()
    except EnvHubError as error:
        end("ls", error)
    hubs = {name: name for name in known_hubs.names()}
    if of_environment is not None:
        hubs.setdefault(address.written(of_environment), of_environment)
    if sys.platform == "linux":
        hubs.setdefault(address.default_address(), address.default_address())
    with ThreadPoolExecutor(max(1, min(len(hubs), 32))) as threads:  # hubs that do not answer are waited for together
        for name, answer in zip(hubs, threads.map(state, hubs.values()), strict=True):
            print_line(f"{name}: {answer}")


def envs(address: str | None = None, *pattern: str, timeout: Seconds = 30.0) -> None:
    """List the envs that a hub offers; of at most 16 also their spaces, for which the hub makes one env of each.

    The exit status is 1 if there are none.

    Parameters
    ----------
    address
        Address or name of the hub; without it ENVHUB_ADDRESS, else where ``envhub serve`` listens by default.
    pattern
        An env to list: an id, or a pattern of ids such as 'ALE/*'. All without any.
    timeout
        Seconds to wait for each answer of the hub, at most 10, and for the making of each env.
    """
    from envhub_client.tools.console import print_envs

    from envhub.errors import EnvHubError

    try:
        if not print_envs(console, errors, address, pattern, timeout):
            sys.exit(EXIT_FAILED)
    except EnvHubError as error:
        end("envs", error, EXIT_FAILED)
