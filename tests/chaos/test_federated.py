"""Trainers over several hubs whose parts end in every way: the rows of the other hubs go on."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from chaos.checker import NEXT_STEP, SAME_STEP
from chaos.federated import FAULTS, SILENCE_S, SLACK_S, Outcome, run
from envhub_client.session.renewal import PAUSE_S_MAX
from hubs import wait_until

THREADS = ("envhub-remake", "envhub-keep-alive")
FAULTS_CHAOS = 50


def check(found: Outcome, restart_wait: float) -> None:
    """See that nothing was lost, that no row of another hub was truncated, and that nothing is left."""
    assert not found.steps.tally.wrong and not found.trainer.endings, found.text
    assert not found.unexplained, (found.unexplained, found.text)
    # A row that is sent while it is on no hub is received once it is made again, after a pause.
    assert found.steps.slowest_s < SILENCE_S + restart_wait + PAUSE_S_MAX + SLACK_S, found.text
    assert found.connections_left <= 0, found.text
    assert wait_until(lambda: not [each for each in threading.enumerate() if each.name in THREADS], 10)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("policy", "mode", "count"), [("recreate", NEXT_STEP, 2), ("redistribute", SAME_STEP, 4)])
def test_rows_of_other_hubs_go_on_in_a_short_run(tmp_path: Path, policy: str, mode: str, count: int) -> None:
    faults = [*FAULTS, "kill", "end"]
    random.Random(7).shuffle(faults)
    found = run(tmp_path, 7, faults, policy, mode, 0.5, count)
    print(found.text)
    check(found, 0.5)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("restart_wait", [0.5, 2.0])
@pytest.mark.parametrize("policy", ["recreate", "redistribute"])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_rows_of_other_hubs_go_on_through_fifty_faults(
    tmp_path: Path, request: pytest.FixtureRequest, policy: str, mode: str, restart_wait: float
) -> None:
    seed = request.config.getoption("--seed")
    print(f"seed {seed}")
    faults = random.Random(seed).choices(FAULTS, k=FAULTS_CHAOS)
    found = run(tmp_path, seed, faults, policy, mode, restart_wait, 2 + seed % 3)
    print(found.text)
    check(found, restart_wait)
