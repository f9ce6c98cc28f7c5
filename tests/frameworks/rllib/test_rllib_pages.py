"""The README's programs with RLlib run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = re.findall(r"```python rllib\n(.*?)```", (ROOT / "client/README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program_of_the_readme_runs(number: int) -> None:
    subprocess.run([sys.executable, "-c", PROGRAMS[number]], check=True)
