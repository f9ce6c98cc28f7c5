"""Commands of ``envhub fleet``, for several hubs together."""

from __future__ import annotations

import sys

from envhub.cli.parameters import Seconds
from envhub.cli.terminal import EXIT_FAILED, console, end


def ls(*hub: str, json: bool = False, timeout: Seconds = 5.0) -> None:
    """List the hubs of fleets and what each does; the exit status is 1 if one of them does not answer.

    Parameters
    ----------
    hub
        A hub's address or name, or a name for several: ``file:///FOLDER`` for those that are announced there.
    json
        Print a JSON list, with an object for each hub.
    timeout
        Seconds for the answers of all hubs together.
    """
    import msgspec
    from envhub_client.fleet.report import reports
    from rich.table import Table

    from envhub.errors import EnvHubError

    try:
        rows = reports(hub, timeout)
    except EnvHubError as error:
        end("fleet ls", error, EXIT_FAILED)
    if json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        table = Table(*("name", "address", "state", "sessions", "envs", "losses"), box=None, pad_edge=False)
        for row in rows:
            cells = row.name, row.address, row.state, row.sessions, row.envs, row.losses
            table.add_row(*("" if cell is None else str(cell) for cell in cells))
        console.print(table)
    sys.exit(0 if all(row.answers for row in rows) else EXIT_FAILED)
