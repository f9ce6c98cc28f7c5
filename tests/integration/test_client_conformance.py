"""``envhub conformance --client`` passes a client that keeps PROTOCOL.md, and fails one by the rule that it breaks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from envhub_client.tools.conformance.client_cases import CASES, LEVELS
from envhub_client.tools.conformance.client_conformance import FAILED, PASSED, RuleVerdict, judged
from envhub_client.tools.conformance.scripted_hub import ScriptedHub
from page_client import PageClient, execute
from wrong_clients import WRONG

CLIENT = Path(__file__).parents[1] / "support/conforming_client.py"
CASE_S = 15.0
RULES = [(name, rule) for name, case in CASES.items() for rule in case.rules]


def conformance(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "envhub", "conformance", "--client", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def verdicts_in(ran: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], str]:
    verdicts = [json.loads(line) for line in ran.stdout.splitlines()]
    return {(verdict["case"], verdict["rule"]): f"{verdict['result']} {verdict['why']}".strip() for verdict in verdicts}


def examined(kind: type[PageClient], name: str) -> list[RuleVerdict]:
    """The verdicts on a client of this process in one case."""
    ended, statuses = threading.Event(), []
    case = CASES[name]
    with ScriptedHub("tcp://127.0.0.1:0") as hub:
        arguments = [hub.address, *([hub.former_token.hex()] if case.program == "attach" else [])]

        def run() -> None:
            statuses.append(execute(kind, case.program, arguments, ended))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            record = hub.run(case.script(), lambda: statuses[0] if statuses else None, CASE_S)
        finally:
            ended.set()
            thread.join()
    assert statuses, "the client ended with an error of its own"
    return judged(name, case, record)


def results(kind: type[PageClient], names: Sequence[str] = tuple(CASES)) -> dict[tuple[str, str], RuleVerdict]:
    """The verdicts on a client by all rules of these cases, which run at the same time."""
    with ThreadPoolExecutor(len(names)) as pool:
        found = [verdict for verdicts in pool.map(partial(examined, kind), names) for verdict in verdicts]
    return {(verdict.case, verdict.rule): verdict for verdict in found}


@pytest.mark.long
def test_client_of_this_repository_passes_all_levels() -> None:
    ran = conformance("--json", "--run", f"{sys.executable} {CLIENT}")
    assert verdicts_in(ran) == dict.fromkeys(RULES, PASSED), ran.stderr
    assert ran.returncode == 0


def test_client_passes_by_each_rule_and_the_cases_are_of_the_levels() -> None:
    found = results(PageClient)
    assert {rule: (verdict.result, verdict.why) for rule, verdict in found.items()} == dict.fromkeys(
        RULES, (PASSED, "")
    )
    assert {case.level for case in CASES.values()} == {*LEVELS}


def test_each_rule_has_a_client_that_breaks_it() -> None:
    assert [*WRONG] == RULES


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES, ids=": ".join)
def test_wrong_client_fails_by_the_rule_that_it_breaks_and_by_no_other(rule: tuple[str, str]) -> None:
    found = results(WRONG[rule])
    assert {key: verdict.why for key, verdict in found.items() if verdict.result == FAILED}.keys() == {rule}
