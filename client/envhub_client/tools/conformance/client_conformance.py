"""``envhub conformance --client``: a scripted hub tests a client in any language."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from envhub.errors import RequestRefused
from envhub.values import codec
from envhub_client.tools.conformance.client_cases import CASES, LEVELS, PROGRAMS, Case, Judge, NotShown
from envhub_client.tools.conformance.counting_envs import values_text
from envhub_client.tools.conformance.scripted_hub import Record, ScriptedHub, Status

PASSED, FAILED, NOT_SHOWN = "passed", "failed", "not shown"


@dataclass(frozen=True)
class RuleVerdict:
    """Result of a client by one rule: ``passed``, ``failed`` or ``not shown``; and why, unless it passed."""

    level: str
    case: str
    rule: str
    result: str
    why: str = ""


def run(
    console: Console, bind: str, names: Sequence[str], command: Sequence[str], as_json: bool, timeout: float
) -> int:
    """Test a client by the cases of these names and levels, all if there are none; print a line per rule.

    The arguments are as those of ``envhub conformance --client``, which describes them; ``command`` is the words of
    ``--run``.

    Returns:
        0 if every rule passed, 1 if one failed, 2 if none failed and some were not shown.

    Raises:
        AddressError: ``bind`` cannot be listened at.
        RequestRefused: there is no such case or level, or the command cannot be run.
    """
    results = set()
    with ScriptedHub(bind) as hub:
        if not as_json:
            console.print(_instructions(hub.address, chosen(names)), markup=False, soft_wrap=True)
        level = ""
        for name in chosen(names):
            if not as_json and CASES[name].level != level:
                level = CASES[name].level
                console.print(f"\n{level}", markup=False)
            if not as_json and not command:
                token = f" {hub.former_token.hex()}" if CASES[name].program == "attach" else ""
                line = f"  {name}: {CASES[name].about}. Run: {CASES[name].program} {hub.address}{token}"
                console.print(line, markup=False, soft_wrap=True)
            for verdict in examine(hub, name, command, timeout):
                results.add(verdict.result)
                if as_json:
                    console.print_json(json.dumps(asdict(verdict)), indent=None)
                else:
                    why = f": {verdict.why}" if verdict.why else ""
                    line = f"  {verdict.result:9}  {verdict.case}: {verdict.rule}{why}"
                    console.print(line, markup=False, soft_wrap=True)
    return 1 if FAILED in results else 2 if NOT_SHOWN in results else 0


def chosen(names: Sequence[str]) -> list[str]:
    """The cases of these names and levels, in the order of the levels.

    Raises:
        RequestRefused: there is no such case or level.
    """
    if strange := [name for name in names if name not in (*CASES, *LEVELS)]:
        there_are = f"there are the levels {', '.join(LEVELS)} and the cases {', '.join(CASES)}"
        raise RequestRefused(f"no case or level is named {', '.join(strange)}; {there_are}")
    return [name for name, case in CASES.items() if not names or name in names or case.level in names]


def examine(hub: ScriptedHub, name: str, command: Sequence[str], seconds: float) -> list[RuleVerdict]:
    """Serve one case, for the program of ``command`` or any client; returns a verdict per rule.

    Raises:
        RequestRefused: the command cannot be run.
    """
    case = CASES[name]
    arguments = [case.program, hub.address, *([hub.former_token.hex()] if case.program == "attach" else [])]
    with _program([*command, *arguments] if command else []) as status:
        record = hub.run(case.script(), status, seconds)
    return judged(name, case, record)


def judged(name: str, case: Case, record: Record) -> list[RuleVerdict]:
    """The verdict by each rule of a case."""
    return [RuleVerdict(case.level, name, rule, *_judged(judge, record)) for rule, judge in case.rules.items()]


def _judged(judge: Judge, record: Record) -> tuple[str, str]:
    try:
        why = judge(record)
    except NotShown as error:
        return NOT_SHOWN, str(error)
    except codec.DecodeError as error:
        return FAILED, f"a header cannot be read: {error}"
    return (FAILED, why) if why else (PASSED, "")


@contextlib.contextmanager
def _program(command: Sequence[str]) -> Iterator[Status | None]:
    """Run the client's program in a process group of its own, which ends with the block; its output goes to stderr.

    Without a command there is no program.

    Raises:
        RequestRefused: it cannot be run.
    """
    if not command:
        yield None
        return
    try:
        running = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), start_new_session=True
        )
    except OSError as error:
        raise RequestRefused(f"--run: {command[0]} cannot be run: {error.strerror}") from error
    try:
        yield running.poll
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _instructions(address: str, names: Sequence[str]) -> str:
    """Instructions for the author of a client."""
    programs = dict.fromkeys(CASES[name].program for name in names)
    texts = "\n".join(f"{name}\n{PROGRAMS[name]}" for name in programs)
    return f"""\
A hub that tests clients listens at {address}.
The client runs a program. Its arguments are the program's name, the address, and for attach a token. It connects, says
HELLO, and does what the name says. When the client raises an error, the program sends CLOSE if it can, and ends with an
exit status from 1 to 127. Otherwise it ends with 0. It is run once for each case.

{texts}

The values of steps:
{values_text()}"""
