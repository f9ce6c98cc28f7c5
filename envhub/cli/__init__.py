"""The ``envhub`` command: this module makes it of its commands, and each other one holds those of a subject."""

from __future__ import annotations

import os
import sys

import cyclopts
from cyclopts import Parameter

from envhub.cli import bench, conformance, hubs, keys, login, record, replays, serve
from envhub.cli.parameters import no_empty_path, shown_default
from envhub.cli.terminal import EXIT_FAILED, EXIT_KEYS, EXIT_USAGE, end, errors
from envhub.errors import FULL_TRACEBACKS
from envhub.systems import only_linux
from envhub.transport.socket_owner import user_text

__all__ = ("EXIT_FAILED", "EXIT_KEYS", "EXIT_USAGE", "app", "main")

app = cyclopts.App(
    name="envhub",
    help="Run Gymnasium environments in a hub, and ask hubs what they do.",
    version_flags=["--version"],
    default_parameter=Parameter(negative="", show_default=shown_default),
    group_arguments=cyclopts.Group("Arguments", validator=no_empty_path),
    group_parameters=cyclopts.Group("Parameters", validator=no_empty_path),
)
app.register_install_completion_command()

keys_app = cyclopts.App(name="keys", help="Admit clients to a hub by keys, list them and remove them.")
app.command(keys_app)  # before its own commands, which get the groups of ``app`` through it
keys_app.command(keys.add)
keys_app.command(keys.list_clients, name="list")
keys_app.command(keys.remove)
for command in (
    *(serve.serve, hubs.health, login.keygen, login.login, login.logout, hubs.ls, hubs.envs, record.record),
    *(bench.demo, bench.bench, conformance.conformance, replays.replays, replays.replay),
):
    app.command(command)


# They start a hub or processes, or read and write files of a hub.
ONLY_LINUX = {"serve", "keys", "record", "demo", "bench", "conformance", "replays", "replay"}


def main() -> None:
    """Run the command line."""
    if sys.platform != "linux" and len(sys.argv) > 1 and sys.argv[1] in ONLY_LINUX:
        end(sys.argv[1], only_linux("this command"))
    try:
        app(sys.argv[1:])
    except PermissionError as error:
        if sys.platform == "win32" or error.filename is None or os.environ.get(FULL_TRACEBACKS):
            raise
        path = os.fsdecode(error.filename)
        text = f"{user_text(os.geteuid())} may not use {path}: name another place, or run this as its owner"
        errors.print(f"envhub: {text}", markup=False, soft_wrap=True)
        sys.exit(EXIT_USAGE)
