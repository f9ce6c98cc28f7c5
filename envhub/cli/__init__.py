"""The ``envhub`` command: ``main`` runs it, ``commands`` has its parser, and other modules the commands."""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple, NoReturn

from envhub.cli.terminal import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    end,
    print_error,
    print_line,
    standard_streams,
)
from envhub.errors import FULL_TRACEBACKS, ONLY_PROGRAMS_RECORD, hidden, only_linux
from envhub.transport.socket_file import user_text

__all__ = ("main",)


# They start a hub or processes, or read and write files of a hub.
ONLY_LINUX = {"serve", "keys", "demo", "bench", "replays", "replay"}
# What was a command or an option of one, and the way that is left; of a key of ``envhub.options.RETIRED`` its text.
RETIRED = {
    "conformance": (
        "hubs and clients are tested from a clone of the repository: cd tests && python -m conformance.kit -h"
    ),
    "record": ONLY_PROGRAMS_RECORD,
    "fleet logs": "Ray keeps the logs of hubs: `ray logs actor --id ID`, with an ID of `ray list actors`",
    "fleet up --announce": "announce",
    "serve --announce": "announce",
    "serve --audit": "audit",
    "serve --replays-max": "replays_max",
    **dict.fromkeys(
        ("replay --until", "replay --video"),
        "there is no --until and no --video any more: --pdb stops in the step that failed",
    ),
}

TIMEOUT_S = 5.0
SLOW_S = 0.1  # a loop that was busy for longer than this is mentioned
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def main() -> None:
    arguments = sys.argv[1:]
    if sys.platform != "linux" and arguments and arguments[0] in ONLY_LINUX:
        end(arguments[0], only_linux("this command"))
    with standard_streams():
        try:
            _run(arguments)
        except PermissionError as error:
            if sys.platform == "win32" or error.filename is None or os.environ.get(FULL_TRACEBACKS):
                raise
            path = os.fsdecode(error.filename)
            text = f"{user_text(os.geteuid())} may not use {path}: name another place, or run this as its owner"
            print_error(f"envhub: {text}")
            sys.exit(EXIT_USAGE)


def _run(arguments: list[str]) -> None:
    # Containers and scripts ask ``health`` every few seconds, so its usual command lines need no import of the parser,
    # of NumPy and of what draws tables.
    if (plain := plain_arguments(arguments)) is not None:
        try:
            check(plain.address, plain.timeout)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
    refuse_retired(arguments)
    from envhub.cli.commands import app

    app(arguments)


def refuse_retired(arguments: list[str]) -> None:
    """End with the way that is left if these arguments have a command or an option that is no more."""
    from envhub.options import RETIRED as RETIRED_OPTIONS

    said = [each.partition("=")[0] for each in arguments]
    for retired, way in RETIRED.items():
        command, _, option = retired.partition(" --")
        words = command.split()
        if said[: len(words)] == words and (not option or f"--{option}" in said):
            end(command, RETIRED_OPTIONS.get(way, way))


class HealthArguments(NamedTuple):
    """Arguments of ``envhub health``."""

    address: str | None = None
    timeout: float = TIMEOUT_S


def plain_arguments(arguments: list[str]) -> HealthArguments | None:
    """The arguments of ``health [ADDRESS] [--timeout SECONDS]``, as the parser reads them; None for other lines."""
    name, *given = arguments or [""]
    timeout = TIMEOUT_S
    if given[-2:-1] == ["--timeout"] and _SECONDS.fullmatch(given[-1]) and float(given[-1]):
        timeout = float(given[-1])
        del given[-2:]
    if name != "health" or len(given) > 1 or not all("://" in address and address[0] != "-" for address in given):
        return None
    return HealthArguments(given[0] if given else None, timeout)


def check(address: str | None, timeout: float) -> NoReturn:
    """Ask a hub for its health, print the answer, and exit; arguments as of ``envhub.connect``."""
    from envhub_client.client import connect

    from envhub.errors import EnvHubError

    try:
        with connect(address, timeout) as client:
            answer = client.health()
    except EnvHubError as error:
        end("health", error, EXIT_FAILED)
    text = f"{answer['sessions']} sessions, up for {answer['uptime_s']:.0f} s"
    if (lag_s := answer.get("loop_lag_s", 0.0)) >= SLOW_S:
        text += f", busy for up to {lag_s:.1f} s at a time"
    print_line(f"{answer['status']}: {text}")
    for name, why in answer.get("unready", {}).items():
        print_line(hidden(f"unready: {name}: {why}"))
    sys.exit(0 if answer["status"] == "ok" else EXIT_FAILED)
