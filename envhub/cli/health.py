"""The work of ``envhub health``.

Containers and scripts ask it every few seconds, so its usual command lines need no import of the command line's
parser, of NumPy and of what draws tables.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple, NoReturn

from envhub.cli.terminal import EXIT_FAILED, end, print_line
from envhub.secret import hidden

TIMEOUT_S = 5.0
SLOW_S = 0.1  # a loop that was busy for longer than this is mentioned
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class HealthArguments(NamedTuple):
    """Arguments of ``envhub health``."""

    address: str | None = None
    timeout: float = TIMEOUT_S


def plain_arguments(arguments: list[str]) -> HealthArguments | None:
    """The arguments of ``health [ADDRESS] [--timeout SECONDS]``; None for any other command line.

    The parser of all commands reads what this does not, and reads what this does in the same way.
    """
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
