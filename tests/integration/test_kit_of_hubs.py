"""The kit passes a hub that keeps the protocol, and says by which rule another one fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conformance.kit.hub_checks import RULES, examine
from conformance.kit.verdict import NOT_SHOWN, PASSED
from hubs import ServedHub

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
def test_command_prints_a_line_for_each_rule(hub: ServedHub) -> None:
    command = [sys.executable, "-m", "conformance.kit", "hub", hub.tcp, "--env", "Nope-v0"]
    ran = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=100)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 1 and len(lines) == len(RULES)
    assert lines[0].startswith("passed     Nope-v0: HELLO") and lines[3].startswith("failed     Nope-v0: frames")
