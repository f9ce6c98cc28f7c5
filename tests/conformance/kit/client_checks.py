"""A scripted hub tests a client in any language."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from conformance.kit.client_cases import CASES, LEVELS, Case, Judge
from conformance.kit.scripted_hub import Record, ScriptedHub, Status
from conformance.kit.verdict import FAILED, NOT_SHOWN, PASSED, NotShown, Verdict

from envhub.values import codec

CASE_S = 30.0


def examine(command: Sequence[str], names: Sequence[str] = ()) -> Iterator[Verdict]:
    """Run the client by each case of these names and levels, all if there are none; the verdicts as they come."""
    if strange := {*names} - {*CASES, *LEVELS}:
        sys.exit(f"no case or level is named {', '.join(strange)}; there are {', '.join((*LEVELS, *CASES))}")
    with ScriptedHub() as hub:
        for name, case in CASES.items():
            if names and name not in names and case.level not in names:
                continue
            with running([*command, *arguments(case, hub)]) as status:
                record = hub.run(case.script(), status, CASE_S)
            yield from judged(name, case, record)


def arguments(case: Case, hub: ScriptedHub) -> list[str]:
    return [case.program, hub.address, *([hub.former_token.hex()] if case.program == "attach" else [])]


def judged(name: str, case: Case, record: Record) -> list[Verdict]:
    return [Verdict(name, rule, *_judged(judge, record)) for rule, judge in case.rules.items()]


def _judged(judge: Judge, record: Record) -> tuple[str, str]:
    try:
        why = judge(record)
    except NotShown as error:
        return NOT_SHOWN, str(error)
    except codec.DecodeError as error:
        return FAILED, f"a header cannot be read: {error}"
    return (FAILED, why) if why else (PASSED, "")


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[Status]:
    """Run the client's program in a process group of its own, which ends with the block; its output goes to stderr."""
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), start_new_session=True)
    try:
        yield program.poll
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
