"""Trainers on every lane under a nemesis: nothing is lost, doubled, torn or another's, and nobody hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.nemesis import EMBEDDED, IPC, LANES, RELAY, TCP, acts
from chaos.run import run


def test_schedule_follows_from_the_seed_alone() -> None:
    def first(seed: int) -> list[object]:
        return [act for _, act in zip(range(50), acts(seed, LANES, 1.0))]  # noqa: B905

    assert first(3) == first(3) != first(4)


@pytest.mark.long
@pytest.mark.parametrize(("seed", "lanes"), [(18, [EMBEDDED, IPC]), (8, [TCP, RELAY])])
def test_nothing_is_lost_in_a_short_run(tmp_path: Path, seed: int, lanes: list[str]) -> None:
    found = run(tmp_path, seed, 1000, lanes, pace_s=0.4, seconds=6)
    print(found.text())
    assert not found.total.wrong, found.text()
    assert found.acts["kill worker"] and found.total.truncations["crash"], found.text()
    # A worker has two rows here, and nobody else's end with it.
    assert found.total.truncations["crash"] <= 2 * found.acts["kill worker"], found.text()


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
