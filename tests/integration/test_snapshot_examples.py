"""The examples with snapshots find what they are to find, and draw it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT
from PIL import Image

EXAMPLES = ROOT / "client/examples"
MONTEZUMA = ["--env", "ale_py:ALE/MontezumaRevenge-v5", "--frames", "128"]
FOUND = {
    "rooms": ("go_explore", ["--frames", "640"], r"random agent \d+ cells, Go-Explore \d+: [1-9]"),
    "game": ("go_explore", MONTEZUMA, r"random agent \d+ cells, Go-Explore \d+: "),
    "lake": ("tree_search", [], r"reward 1 after 6 moves"),
    "curriculum": ("curriculum", [], r"start: 0% (.|\n)*curriculum: ([5-9]\d|100)%"),
    "crash": ("go_back", [], r"exited with status 7(.|\n)*10 steps before(.|\n)* 1 steps before.*: *x 0.20.*0 of 8"),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "arguments", "printed"), FOUND.values(), ids=FOUND)
def test_example_finds_and_draws(name: str, arguments: list[str], printed: str, tmp_path: Path) -> None:
    program, picture = EXAMPLES / f"{name}.py", tmp_path / "found.png"
    command = [sys.executable, str(program), *arguments, "--picture", str(picture)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and re.search(printed, ran.stdout), ran.stdout + ran.stderr
    with Image.open(picture) as opened:
        colors = opened.convert("RGB").getcolors(1 << 20)
        assert colors is not None and len(colors) > 1
    assert len(program.read_text().splitlines()) <= 100
