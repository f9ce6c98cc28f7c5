"""The example with TorchRL trains until it has learned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hubs import serve

EXAMPLE = Path(__file__).parents[3] / "client/examples/torchrl_ppo.py"
LINES_MAX, LEARNED, LEARNING_S = 100, 475.0, 120


def ran(*arguments: str, timeout: float | None = None) -> float:
    """The mean return that the example prints."""
    command = [sys.executable, EXAMPLE, *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert output.returncode == 0, output.stderr
    found = re.search(r"mean return of 50 episodes: ([\d.]+)", output.stdout)
    assert found, output.stdout
    return float(found[1])


def test_example_is_short_and_trains_over_tcp(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= LINES_MAX
    with serve(tmp_path, "CartPole-v1") as hub:
        assert 8 <= ran("--steps", "4096", "--hub", hub.tcp) <= 500


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_example_learns_within_two_minutes(seed: int) -> None:
    assert ran("--seed", str(seed), timeout=LEARNING_S) >= LEARNED
