"""The request for a session: what the options add to it, and what the hub must be able to do for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from envhub import errors
from envhub.protocol.messages import Make, ProgramEnvironment
from envhub.transport.address import parse
from envhub.values.compression import available
from envhub_client.connection.connection import Connection
from envhub_client.connection.zeromq_transport import HEARTBEAT_MS
from envhub_client.private_hub.program_environment import by_value_if_unimportable
from envhub_client.session.factories import own_python, pickled_for_workers
from envhub_client.session.options import PRIVATE, SessionOptions


def filled_in(
    make: Make,
    options: SessionOptions,
    connection: Connection,
    program_environment: ProgramEnvironment | None,
    num_workers: int | None = None,
) -> Make:
    """The request with what the options say, for the hub of this connection.

    ``program_environment`` is the program's, of a private hub. ``num_workers`` takes the place of the option.

    Raises:
        RequestRefused: an option is one for private hubs, or one side cannot compress so.
        TypeError: ``worker_setup`` cannot be pickled.
    """
    chosen = [name for name in PRIVATE if getattr(options.hosting, name) is not None]
    if chosen and program_environment is None:
        text = "for private hubs (hub=None) only; its operator says it"
        raise errors.RequestRefused(f"{' and '.join(chosen)}: {text}")
    is_private = program_environment is not None
    if program_environment is not None and chosen:
        python = "" if options.hosting.python is None else os.path.expanduser(str(options.hosting.python))
        program_environment = replace(program_environment, python=python, rendering=options.hosting.rendering or "")
    if num_workers is None and not isinstance(options.num_workers, str):
        num_workers = options.num_workers
    return replace(
        make,
        num_workers=num_workers,
        autoreset_mode=options.autoreset_mode.value,
        observation_mode=options.observation_mode if isinstance(options.observation_mode, str) else "different",
        program_environment=program_environment,
        columns=True,
        spin_us=options.spin_us,
        pin=options.pin,
        compression=chosen_compression(options, connection),
        faults=options.faults.wire(),
        heartbeat_s=HEARTBEAT_MS / 1000,
        hosting=options.hosting.wire(),
        **_setup(make, options.hosting.worker_setup, is_private),
    )


def _setup(make: Make, setup: str | Callable[[], object] | None, is_private: bool) -> dict[str, Any]:
    """The fields of a request that say what sets workers up.

    Raises:
        TypeError: it cannot be pickled.
    """
    if isinstance(setup, str) and is_private:
        setup = by_value_if_unimportable(setup)
    if setup is None or isinstance(setup, str):
        return {"worker_setup": setup or ""}
    return {"worker_setup_code": pickled_for_workers("worker_setup", setup), "python": make.python or own_python()}


def chosen_compression(options: SessionOptions, connection: Connection) -> str:
    """The method that both sides have of what was asked for; empty for none.

    Raises:
        RequestRefused: one of them lacks it.
    """
    wanted, address = options.compression, parse(connection.address)
    if wanted is None or (wanted == "auto" and (address.is_ipc or address.is_loopback)):
        return ""
    theirs, ours = connection.welcome.compressions, available()
    if wanted == "auto":
        return next((method for method in ours if method in theirs), "")
    for side, methods in ((errors.hub_at(address.text), theirs), ("this client", ours)):
        if wanted not in methods:
            raise errors.RequestRefused(
                f'compression={wanted!r}: {side} lacks the library; pip install "envhub-rl[compression]" there'
            )
    return wanted
