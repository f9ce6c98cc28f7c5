"""Commands that ask hubs, ``health``, ``ls`` and ``envs``, and those of ``envhub fleet``, for several hubs together."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from envhub.cli import EXIT_FAILED, TIMEOUT_S, check, end, print_json, print_line
from envhub.cli.commands import Count, Seconds, console, errors
from envhub.errors import EnvHubError
from envhub.transport import address as addresses

if TYPE_CHECKING:
    from envhub.fleet import Fleet


def _hub_names(context: Any) -> list[str]:
    from envhub_client.connection import known_hubs

    own = [addresses.default_address()] if sys.platform == "linux" else []
    return [*known_hubs.names(), *own]


HubAddress = Annotated[
    str | None,
    Parameter(
        completer=_hub_names,
        alias="--hub",
        help="Address or name of the hub; without it ENVHUB_ADDRESS, else where ``envhub serve`` listens by default.",
    ),
]


def health(address: HubAddress = None, *, timeout: Seconds = TIMEOUT_S) -> None:
    """Ask a hub whether it serves; exit with 0 if it does, 1 if it does not answer or is shutting down.

    Parameters
    ----------
    timeout
        Seconds to wait for the answer.
    """
    check(address, timeout)


def ls() -> None:
    """List the hubs that this user can name, the one of ENVHUB_ADDRESS among them, and whether they answer."""
    from concurrent.futures import ThreadPoolExecutor

    from envhub_client.client import connect

    own = addresses.default_address() if sys.platform == "linux" else ""

    def state(hub: Any) -> str:
        try:
            is_absent = hub == own and not Path(addresses.parse(hub).path).exists()
            with connect(hub, timeout=0.1 if is_absent else 2.0) as client:
                return str(client.health()["status"])
        except EnvHubError as error:
            return str(error)

    try:
        address_of_environment = addresses.address_of_environment()
    except EnvHubError as error:
        end("ls", error)
    hubs = {name: name for name in _hub_names(None)}
    if address_of_environment is not None:
        hubs.setdefault(addresses.written(address_of_environment), address_of_environment)
    with ThreadPoolExecutor(max(1, min(len(hubs), 32))) as threads:  # hubs that do not answer are waited for together
        for name, answer in zip(hubs, threads.map(state, hubs.values()), strict=True):
            print_line(f"{name}: {answer}")


def envs(address: HubAddress = None, *pattern: str, timeout: Seconds = 30.0) -> None:
    """List the envs that a hub offers; of at most 16 also their spaces, for which the hub makes one env of each.

    The exit status is 1 if there are none.

    Parameters
    ----------
    pattern
        An env to list: an id, or a pattern of ids such as 'ALE/*'. All without any.
    timeout
        Seconds to wait for each answer of the hub, at most 10, and for the making of each env.
    """
    from envhub_client.tools.console import print_envs

    if not print_envs(console, errors, address, pattern, timeout):
        sys.exit(EXIT_FAILED)


def top(
    *hub: str,
    once: bool = False,
    json: bool = False,
    look: Seconds = 7.0,
    stuck: Seconds = 5.0,
    timeout: Seconds = TIMEOUT_S,
) -> None:
    """Watch the sessions of hubs and fleets, find those in trouble, look deeper, and act. Needs the extra "top".

    A session is stuck, crash-looping, leaking (its memory grows steadily) or slow (its env takes far longer than its
    neighbours). Where the output is no terminal, and with --once or --json, this prints what it finds, and ends. Then
    the exit status is 1 if a hub does not answer.

    Parameters
    ----------
    hub
        A hub's address or name, or a name for several: ``dns://NAME:PORT`` for those at a name's addresses,
        ``ray://FLEET`` for a fleet on Ray; without any, that of ENVHUB_ADDRESS, or the hub of this machine.
    once
        Print one table, which needs no extra.
    json
        Print a JSON object with "hubs", "sessions" and "findings".
    look
        With --once or --json, seconds to look at the sessions. A leak shows after 5.
    stuck
        Seconds of one step, reset or call after which a worker is stuck.
    timeout
        Seconds for each answer of a hub.
    """
    from envhub_client.tools.console import print_rows
    from envhub_client.tools.watch import HEADINGS, Watch

    with Watch(hub or [addresses.address_of_environment() or ""], timeout, stuck) as watch:
        if console.is_terminal and not (once or json):
            try:
                from envhub_client.tools.top import Top
            except ModuleNotFoundError as error:
                end("top", f"{error}: pip install 'envhub-rl[top]', or print one table with --once", EXIT_FAILED)
            Top(watch).run()
            return
        watch.look(look)
    if json:
        print_json(watch.report())
    else:
        print_rows(console, HEADINGS, watch.table())
        lost = [f"{state.name}: {state.why}" for state in watch.states.values() if state.why]
        for line in [*(f"{each.session}: {each}" for each in watch.findings), *lost]:
            errors.print(line, markup=False, soft_wrap=True)
    sys.exit(EXIT_FAILED if any(state.why for state in watch.states.values()) else 0)


FleetName = Annotated[str, Parameter(help="Name of the fleet.")]
RayAddress = Annotated[
    str, Parameter(help="Address of the Ray cluster; by default that of RAY_ADDRESS, else the one of this machine.")
]


def list_fleet(*hub: str, json: bool = False, timeout: Seconds = 5.0) -> None:
    """List the hubs of fleets and what each does; the exit status is 1 if one of them does not answer.

    Parameters
    ----------
    hub
        A hub's address or name, or a name for several: ``dns://NAME:PORT`` for those at a name's addresses,
        ``ray://FLEET`` for a fleet on Ray; without any, that of ENVHUB_ADDRESS.
    json
        Print a JSON list, with an object for each hub.
    timeout
        Seconds for the answers of all hubs together.
    """
    from envhub_client.tools.console import FLEET_HEADINGS, fleet_cells, print_rows, reports

    address_of_environment = addresses.address_of_environment()
    hubs = hub or ([] if address_of_environment is None else [address_of_environment])
    if not hubs:
        end("fleet ls", f"name the hubs to list, or set {addresses.ENVIRONMENT_VARIABLE}")
    rows = reports(hubs, timeout)
    if json:
        print_json(rows)
    else:
        print_rows(console, FLEET_HEADINGS, [*map(fleet_cells, rows)])
        for row in rows:
            if row.why:
                errors.print(f"{row.name}: {row.why}", markup=False, soft_wrap=True)
    if not rows:
        errors.print(f"no hub is there: {' '.join(hub)}", markup=False, soft_wrap=True)
    sys.exit(0 if rows and all(row.answers for row in rows) else EXIT_FAILED)


def up(
    *env: str,
    name: FleetName,
    hubs: Count = 1,
    cpus_per_hub: float = 1.0,
    config: Path | None = None,
    ray: RayAddress = "auto",
) -> None:
    """Start a fleet on a Ray cluster, and wait until all of its hubs serve. Needs the extra "ray".

    Clients that are connected to Ray, or on a node of it, connect with ``hub="ray://NAME"``.

    Parameters
    ----------
    env
        An env that each hub offers, as ``envhub serve`` takes it. Without any, here and in the file, every registered
        id.
    hubs
        Number of hubs, which Ray spreads over the nodes.
    cpus_per_hub
        Number of CPUs that Ray reserves for each hub, and that the hub plans its workers with.
    config
        A configuration file of ``envhub serve``. Paths in it are those of the nodes.
    """
    with connected_to_ray("fleet up", ray) as fleets:
        fleet = fleets.up(name, env, hubs=hubs, cpus_per_hub=cpus_per_hub, config=config)
        _print_hubs(fleet)
        console.print(f'connect with hub="ray://{name}"')


def scale(name: FleetName, hubs: Count, *, ray: RayAddress = "auto") -> None:
    """Change the number of hubs of a fleet: start some, or drain those of the highest numbers.

    Parameters
    ----------
    hubs
        Number of hubs that it then has.
    """
    with connected_to_ray("fleet scale", ray) as fleets:
        fleet = fleets(name)
        fleet.scale(hubs)
        _print_hubs(fleet)


def down(name: FleetName, *, ray: RayAddress = "auto") -> None:
    """Drain the hubs of a fleet, and end it."""
    with connected_to_ray("fleet down", ray) as fleets:
        fleets(name).down()


def _print_hubs(fleet: Fleet) -> None:
    for hub in fleet.ls():
        console.print(f"{hub.index}: {hub.state} {hub.address or hub.why}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def connected_to_ray(command: str, address: str) -> Iterator[type[Fleet]]:
    """Connect to a Ray cluster that exists, and yield ``Fleet``; end the command if a value is not allowed."""
    from envhub.fleet import Fleet
    from envhub.fleet.fleet import connect

    connect(address)
    try:
        yield Fleet
    except ValueError as error:
        end(command, error, EXIT_FAILED)
