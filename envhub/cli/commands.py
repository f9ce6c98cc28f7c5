"""The parser of the command line, with all commands; a command's module is imported when it is run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, get_args

import cyclopts
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console

from envhub.errors import hidden
from envhub.options import no_path

Seconds = Annotated[float, Parameter(validator=Number(gt=0, lt=math.inf))]
Count = Annotated[int, Parameter(validator=Number(gte=1))]
KeyText = Annotated[str, Parameter(allow_leading_hyphen=True)]  # base64 with ``-``, which may be its first character


def shown_default(value: object) -> str | None:
    """Text of a default in the help; None for a flag that is off, and where nothing is given by default."""
    return str(value) if value or (value == 0 and value is not False) else None


def no_empty_path(arguments: cyclopts.ArgumentCollection) -> None:
    """Refuse a URL, and an empty path, as of a variable that is not set: it would be the current folder."""
    for argument in arguments:
        if Path in (argument.hint, *get_args(argument.hint)):
            for token in argument.tokens:
                if why := no_path(token.value):
                    raise ValueError(f"{argument.name}: {why}")


console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

app = cyclopts.App(
    name="envhub",
    help="Run Gymnasium environments in a hub, and ask hubs what they do.",
    version_flags=["--version"],
    default_parameter=Parameter(negative="", show_default=shown_default),
    group_arguments=cyclopts.Group("Arguments", validator=no_empty_path),
    group_parameters=cyclopts.Group("Parameters", validator=no_empty_path),
    error_formatter=lambda error: cyclopts.CycloptsPanel(hidden(str(error))),
)
app.register_install_completion_command()
# Before their own commands, which get the groups of ``app`` through them.
app.command(keys := cyclopts.App(name="keys", help="Admit clients to a hub by keys, list them and remove them."))
fleet_help = "Several hubs together: list them and what they do, start and end them on a Ray cluster."
app.command(fleet := cyclopts.App(name="fleet", help=fleet_help))
app.command(service := cyclopts.App(name="service", help="Run a hub by systemd, from the start of the machine on."))
for group, names in (
    (app, ("serve:serve", "serve:bench", "serve:demo", "serve:replays", "serve:replay")),
    (app, ("serve:doctor", "serve:validate")),
    (app, ("hubs:health", "hubs:ls", "hubs:top", "hubs:envs", "keys:keygen", "keys:login", "keys:logout")),
    (app, ("operate:sessions", "operate:end", "operate:stack", "operate:frame", "operate:slow", "operate:restart")),
    (app, ("operate:drain", "operate:reload")),
    (keys, ("keys:add", "keys:list_clients", "keys:remove")),
    (fleet, ("hubs:list_fleet", "hubs:up", "hubs:scale", "hubs:down")),
    (service, ("service:install", "service:uninstall")),
):
    for name in names:
        command = name.partition(":")[2]
        group.command(f"envhub.cli.{name}", name={"list_clients": "list", "list_fleet": "ls"}.get(command, command))
