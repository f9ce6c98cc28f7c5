"""The ``envhub`` command: ``main`` runs it, ``commands`` has its parser, and other modules the commands."""

from __future__ import annotations

import os
import sys

from envhub.cli import health
from envhub.cli.terminal import EXIT_INTERRUPTED, EXIT_USAGE, end, print_error, standard_streams
from envhub.errors import FULL_TRACEBACKS, ONLY_PROGRAMS_RECORD, only_linux
from envhub.transport.socket_file import user_text

__all__ = ("main",)


# They start a hub or processes, or read and write files of a hub.
ONLY_LINUX = {"serve", "keys", "demo", "bench", "replays", "replay"}
# What was a command, and the way that is left.
RETIRED = {
    "conformance": (
        "hubs and clients are tested from a clone of the repository: cd tests && python -m conformance.kit -h"
    ),
    "record": ONLY_PROGRAMS_RECORD,
}


def main() -> None:
    if sys.platform != "linux" and len(sys.argv) > 1 and sys.argv[1] in ONLY_LINUX:
        end(sys.argv[1], only_linux("this command"))
    for name in RETIRED.keys() & {*sys.argv[1:2]}:
        end(name, RETIRED[name])
    with standard_streams():
        try:
            _run(sys.argv[1:])
        except PermissionError as error:
            if sys.platform == "win32" or error.filename is None or os.environ.get(FULL_TRACEBACKS):
                raise
            path = os.fsdecode(error.filename)
            text = f"{user_text(os.geteuid())} may not use {path}: name another place, or run this as its owner"
            print_error(f"envhub: {text}")
            sys.exit(EXIT_USAGE)


def _run(arguments: list[str]) -> None:
    if (plain := health.plain_arguments(arguments)) is None:
        from envhub.cli.commands import app

        app(arguments)
        return
    try:
        health.check(plain.address, plain.timeout)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
