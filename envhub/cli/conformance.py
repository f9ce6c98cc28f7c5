"""Command ``envhub conformance``."""

from __future__ import annotations

import math
import shlex
import sys

from envhub.cli.consoles import console
from envhub.cli.parameters import Seconds
from envhub.cli.terminal import EXIT_FAILED, end, errors_in_a_line
from envhub.errors import EnvHubError


def conformance(
    address: str | None = None,
    *,
    env: list[str] | None = None,
    client: bool = False,
    bind: str = "tcp://127.0.0.1:0",
    case: list[str] | None = None,
    run: str | None = None,
    json: bool = False,
    timeout: Seconds = 30.0,
) -> None:
    """Check from outside that a hub keeps the protocol and Gymnasium's contract; or with --client, that a client does.

    Of a hub, the exit status is 1 if it does not keep them. Of a client, it is 0 if it passed by every rule, 1 if it
    failed by one, and 2 if it failed by none and did not get as far as some, or could not be tested.

    Parameters
    ----------
    address
        Address or name of the hub to check.
    env
        An env to check the hub with; may be given more than once. Without any, the first that the hub offers.
    client
        Test a client in any language: serve a hub that loses, doubles and changes messages. It prints what the client
        has to do.
    bind
        Where the hub that tests a client listens.
    case
        Case to test a client with, or a level of PROTOCOL.md (basic, resilient, parts, attach); may be given more than
        once. Without any, all of them.
    run
        The command that runs the client, such as "node client.js", to which the program's name, the address and for
        "attach" a token are added. Without it each case waits until a client connects.
    json
        Print one JSON object per check instead of a table.
    timeout
        Seconds to wait for each answer of the hub; of a client, seconds that a case may take.
    """
    if not 0 < timeout < math.inf:
        end("conformance", f"--timeout is a positive number of seconds, got {timeout}")
    if client:
        if address is not None or env:
            end("conformance", "--client serves a hub: it takes no address and no --env")
        from envhub_client.tools.conformance.client_conformance import run as test_client

        try:
            command = shlex.split(run or "")
        except ValueError as error:
            end("conformance", f"--run {run}: {error}")
        try:
            sys.exit(test_client(console, bind, case or (), command, json, timeout))
        except EnvHubError as error:
            end("conformance", error)
    if address is None or case or run:
        end("conformance", "name the address of a hub; or test a client with --client, which --case and --run go with")
    from envhub_client.tools.conformance.conformance import run as test_hub

    with errors_in_a_line("conformance"):
        if not test_hub(console, address, env or (), json, timeout):
            sys.exit(EXIT_FAILED)
