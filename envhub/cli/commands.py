"""The parser of the command line, with all commands."""

from __future__ import annotations

import cyclopts
from cyclopts import Parameter

from envhub.cli import bench, fleet, hubs, keys, replays, serve
from envhub.cli.parameters import no_empty_path, shown_default
from envhub.secret import hidden

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

keys_app = cyclopts.App(name="keys", help="Admit clients to a hub by keys, list them and remove them.")
app.command(keys_app)  # before its own commands, which get the groups of ``app`` through it
keys_app.command(keys.add)
keys_app.command(keys.list_clients, name="list")
keys_app.command(keys.remove)
fleet_app = cyclopts.App(
    name="fleet", help="Several hubs together: list them and what they do, start and end them on a Ray cluster."
)
app.command(fleet_app)
fleet_app.command(fleet.ls)
fleet_app.command(fleet.up)
fleet_app.command(fleet.scale)
fleet_app.command(fleet.logs, show=False)
fleet_app.command(fleet.down)
for command in (
    *(serve.serve, hubs.health, keys.keygen, keys.login, keys.logout, hubs.ls, hubs.envs),
    *(bench.demo, bench.bench, replays.replays, replays.replay),
):
    app.command(command)
