"""The programs with RLlib of the pages run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pages import blocks

PROGRAMS = blocks("python rllib")


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program_of_a_page_runs(number: int) -> None:
    subprocess.run([sys.executable, "-c", PROGRAMS[number]], check=True)
