"""Trainers on every lane under a nemesis: nothing is lost, doubled, torn or another's, and nobody hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.nemesis import EMBEDDED, IPC, LANES, RELAY, TCP, Act, acts
from chaos.run import run


def test_schedule_follows_from_the_seed_alone() -> None:
    def first(seed: int) -> list[object]:
        return [act for _, act in zip(range(50), acts(seed, LANES, 1.0))]  # noqa: B905

    assert first(3) == first(3) != first(4)


FIRST = {
    EMBEDDED: ["kill worker"],
    IPC: ["take over", "kill worker", "meddle"],
    TCP: ["abandon", "take over", "kill worker"],
    RELAY: ["repeat", "return late", "meddle"],
}
ROWS_A_WORKER_MAX = 8


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "lanes"), [(18, [EMBEDDED, IPC]), pytest.param(8, [TCP, RELAY], marks=pytest.mark.chaos)]
)
def test_nothing_is_lost_in_a_short_run(tmp_path: Path, seed: int, lanes: list[str]) -> None:
    first = [Act(what, lane, 0, 2.0 if what == "repeat" else 0.0) for lane in lanes for what in FIRST[lane]]
    found = run(tmp_path, seed, 1000, lanes, pace_s=0.4, seconds=8, first=first)
    print(found.text())
    assert not found.total.wrong, found.text()
    assert found.acts["kill worker"] and found.total.truncations["crash"], found.text()
    # Nobody else's rows end with those of a worker.
    assert found.total.truncations["crash"] <= ROWS_A_WORKER_MAX * found.acts["kill worker"], found.text()
    assert found.total.inherited or found.endings["SessionLost of attach"], found.text()
    assert RELAY not in lanes or (found.relayed["repeated"] and found.acts["return late"]), found.text()


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_nothing_is_lost_in_a_million_steps(
    tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, steps = request.config.getoption("--seed"), request.config.getoption("--steps")

    def say(text: str) -> None:
        with capsys.disabled():
            print(text)

    say(f"\nseed {seed}")
    found = run(tmp_path, seed, steps, say=say)
    say(found.text())
    assert not found.total.wrong
    assert found.total.acknowledged >= steps
