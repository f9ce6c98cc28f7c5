"""The command line of the kit."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable

from conformance.kit import client_checks, hub_checks
from conformance.kit.client_cases import PROGRAMS
from conformance.kit.verdict import FAILED, NOT_SHOWN, Verdict

ABOUT = """\
The client runs a program, once for each case. The arguments of the command are the program's name, the address of the
hub, and for attach a token. The program connects, says HELLO, and does what its name says. When the client raises an
error, the program sends CLOSE if it can, and ends with an exit status from 1 to 127. Otherwise it ends with 0. The
frames of "steps" with all values are in tests/conformance/golden.json.
"""


def main() -> int:
    """Print the verdicts; returns 0 if all passed, 1 if one failed, 2 if none failed and some were not shown."""
    parser = argparse.ArgumentParser(prog="python -m conformance.kit", description=__doc__)
    subjects = parser.add_subparsers(dest="subject", required=True)
    hub = subjects.add_parser("hub", help="test a hub")
    hub.add_argument("address")
    hub.add_argument("--env", action="append", help="an env to test it with; without any, the first that it offers")
    programs = "\n".join(f"{name}\n{does}" for name, does in PROGRAMS.items())
    client = subjects.add_parser(
        "client",
        help="test a client",
        epilog=f"{ABOUT}\n{programs}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    client.add_argument("--case", action="append", default=[], help="a case or a level; without any, all cases")
    client.add_argument("command", help='runs the client, such as "node client.js"')
    asked = parser.parse_args()
    if asked.subject == "hub":
        return brief(hub_checks.examine(asked.address, asked.env))
    return brief(client_checks.examine(shlex.split(asked.command), asked.case))


def brief(verdicts: Iterable[Verdict]) -> int:
    """Print the verdicts as they come; returns the exit status."""
    results = set()
    for verdict in verdicts:
        results.add(verdict.result)
        print(f"{verdict.result:9}  {verdict.case}: {verdict.rule}{verdict.why and f': {verdict.why}'}", flush=True)
    return 1 if FAILED in results else 2 if NOT_SHOWN in results else 0


if __name__ == "__main__":
    sys.exit(main())
