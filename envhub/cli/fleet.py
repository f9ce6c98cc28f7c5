"""Commands of ``envhub fleet``, for several hubs together."""

from __future__ import annotations

import sys

from envhub.cli.consoles import console, errors
from envhub.cli.parameters import Seconds
from envhub.cli.terminal import EXIT_FAILED, end


def ls(*hub: str, json: bool = False, timeout: Seconds = 5.0) -> None:
    """List the hubs of fleets and what each does; the exit status is 1 if one of them does not answer.

    Parameters
    ----------
    hub
        A hub's address or name, or a name for several: ``file:///FOLDER`` for those that are announced there,
        ``dns://NAME:PORT`` for those at a name's addresses; without any, that of ENVHUB_ADDRESS.
    json
        Print a JSON list, with an object for each hub.
    timeout
        Seconds for the answers of all hubs together.
    """
    import msgspec
    from envhub_client.fleet.report import reports, table

    from envhub.errors import EnvHubError
    from envhub.transport import address

    try:
        of_environment = address.of_environment()
        hubs = hub or ([] if of_environment is None else [of_environment])
        rows = reports(hubs, timeout)
    except EnvHubError as error:
        end("fleet ls", error, EXIT_FAILED)
    if not hubs:
        end("fleet ls", f"name the hubs to list, or set {address.ENVIRONMENT_VARIABLE}")
    if json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        for line in table(rows):
            console.print(line, markup=False, soft_wrap=True)
        for row in rows:
            if row.why:
                errors.print(f"{row.name}: {row.why}", markup=False, soft_wrap=True)
    sys.exit(0 if all(row.answers for row in rows) else EXIT_FAILED)
