"""Command ``envhub serve``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from envhub.cli.parameters import console, errors
from envhub.cli.terminal import EXIT_KEYS, end
from envhub.options import RETIRED, HubArguments
from envhub.secret import hidden


def serve(
    *env: str,
    config: Path | None = None,
    options: Annotated[HubArguments | None, Parameter(name="*")] = None,
    announce: Annotated[str | None, Parameter(show=False)] = None,
    audit: Annotated[str | None, Parameter(show=False)] = None,
    replays_max: Annotated[str | None, Parameter(show=False)] = None,
) -> None:
    """Run a hub until SIGTERM or Ctrl-C.

    It prints where it listens, and a line of Python that connects to it. Without --bind, programs of this user on this
    machine find it by ``envhub.connect()``.

    Parameters
    ----------
    env
        An env to offer: a Gymnasium id such as CartPole-v1, ``module:id`` for an id that a module registers, a pattern
        of ids such as 'ALE/*', or ``name=module:factory``. Without any, here and in the file, every registered id.
    config
        A TOML file with any of the options below, by the same names with ``_`` for ``-``, and a table ``[envs.NAME]``
        for each env. The command line comes before the file.
    """
    from envhub_server.catalog.registry import EnvNotFound
    from envhub_server.hub.hub import Hub
    from envhub_server.log import HubStream
    from envhub_server.network.descriptor_guard import DescriptorsShort
    from envhub_server.processes.interpreter import UnsafeFolder
    from envhub_server.serve import config_of
    from envhub_server.serve import serve as run

    from envhub.errors import AddressError, KeysError

    def ready(hub: Hub) -> None:
        for address in hub.addresses:
            console.print(f"listening on {address}", soft_wrap=True)
        if hub.config.keys is not None and hub.addresses[0].startswith("tcp"):
            console.print("clients with a key, see `envhub keys add`, run `envhub login` once")
        if hub.config.allow_factories:
            errors.print(
                "[bold red]factories:[/] workers run code of its own user and of keys that may deploy", soft_wrap=True
            )
        if hub.config.insecure and hub.config.keys is None:
            errors.print("[bold red]insecure:[/] every program that reaches these addresses may use it", soft_wrap=True)

    def listed(hub: Hub) -> None:
        first = re.sub(r"//(0\.0\.0\.0|\[::\]):", "//HOST:", hub.addresses[0])
        if hub.config.keys is not None and first.startswith("tcp"):
            first = "HOST"
        if name := hub.example():
            num_envs = min(64, hub.config.envs_per_session_max)
            hint = f'connect with: envhub.make_vec("{name}", num_envs={num_envs}, hub="{first}")'
            console.print(hint, soft_wrap=True)
            return
        for name, why in hub.unready().items():
            console.print(f"unready: {hidden(name)}: {why}", markup=False, soft_wrap=True)

    for name, given in (("announce", announce), ("audit", audit), ("replays_max", replays_max)):
        if given is not None:
            end("serve", RETIRED[name])
    try:
        hub_config = config_of(env, options, config)
    except ValueError as error:
        end("serve", error)
    sys.stdout, sys.stderr = HubStream(1), HubStream(2)
    try:
        run(hub_config, ready, listed)
    except (AddressError, DescriptorsShort, EnvNotFound, UnsafeFolder) as error:
        end("serve", error)
    except KeysError as error:
        end("serve", error, EXIT_KEYS)
