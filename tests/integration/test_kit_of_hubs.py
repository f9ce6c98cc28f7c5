"""The kit passes a hub that keeps the protocol, and fails one by the rule that it breaks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conformance.kit.hub_checks import RULES, examine, verdict
from conformance.kit.verdict import FAILED, NOT_SHOWN, PASSED
from hubs import ServedHub
from wrong_hubs import NOISE, WRONG_HUBS, tampered

TESTS = Path(__file__).parents[1]


def results(address: str, envs: Sequence[str] | None = None) -> set[tuple[str, str, str, str]]:
    """What did not pass."""
    verdicts = [*examine(address, envs)]
    assert [each.rule for each in verdicts] == [*RULES] * len(envs or [""])
    return {(each.case, each.rule, each.result, each.why) for each in verdicts if each.result != PASSED}


def test_hub_keeps_the_protocol(hub: ServedHub) -> None:
    assert results(hub.tcp, ["CartPole-v1", "graphs"]) == set()


@pytest.mark.long
@pytest.mark.parametrize("lane", ["ipc", "tcp"])
def test_hub_keeps_the_protocol_with_other_envs(hub: ServedHub, lane: str) -> None:
    found = results(getattr(hub, lane), ["nested", "Blackjack-v1", "counter"])
    assert {(case, result) for case, _, result, _ in found} == {("counter", NOT_SHOWN)}  # whose episodes never end


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
def test_wrong_hub_fails_by_the_rule_that_it_breaks(hub: ServedHub, rule: str) -> None:
    noise = NOISE if rule.startswith("messages without") else None
    with tampered(hub.tcp, WRONG_HUBS[rule](), noise) as address:
        found = verdict(address, "CartPole-v1", rule, RULES[rule])
    assert found.result == FAILED and "Timeout" not in found.why


@pytest.mark.long
def test_command_prints_a_line_for_each_rule(hub: ServedHub) -> None:
    command = [sys.executable, "-m", "conformance.kit", "hub", hub.tcp, "--env", "Nope-v0"]
    ran = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=100)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 1 and len(lines) == len(RULES)
    assert lines[0].startswith("passed     Nope-v0: HELLO") and lines[3].startswith("failed     Nope-v0: frames")
