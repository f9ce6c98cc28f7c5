"""``python -m side_by_side``: every way is timed and printed; how fast each is, fails no test."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from envhub_client.tools import bench
from rich.console import Console
from side_by_side import __main__ as command
from side_by_side import shapes

WAYS = [bench.ASYNC, bench.SYNC, bench.PRIVATE, bench.IPC, bench.TCP, "pyzmq echo"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "tests/benchmarks/NOTES.md"])
def test_command_of_the_table_is_understood(page: str) -> None:
    text = (ROOT / "tests/benchmarks/NOTES.md").read_text()
    (line,) = re.findall(r"^python -m side_by_side (.+)$", text, re.MULTILINE)
    asked = command.parser().parse_args(line.split())
    columns = re.findall(r"^\| envs, 1 / 16 / 64 \| (.+) \|$", (ROOT / page).read_text(), re.MULTILINE)
    assert [" | ".join(asked.envs)] == columns and asked.n == "1,16,64"


@pytest.mark.long
def test_table_has_every_way_for_every_number_of_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVHUB_ADDRESS", "tcp://127.0.0.1:1")  # which is not to be timed
    console = Console(file=io.StringIO(), width=80)
    command.main(["CartPole-v1", "-n", "1,3", "--seconds", "0.01", "--repeats", "2"], console)
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    ways = [line.strip().split("  ")[0] for line in text.splitlines()]
    assert [way for way in ways if way in WAYS] == 2 * WAYS
    assert "…" not in text and "gymnasium 1" in text


def test_table_of_shapes_names_every_row_once() -> None:
    names = [(row.name, row.num_envs) for row in shapes.rows()]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.long
def test_table_of_shapes_has_a_ratio_for_every_lane(capsys: pytest.CaptureFixture[str]) -> None:
    shapes.main(["call, a float 1", "Text 4", "--turns", "1", "--seconds", "0.01"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "(" in line and "|" in line]
    assert [cells[0].strip() for cells in rows] == ["call, a float", "Text"]
    assert all(re.fullmatch(r" [\d.]+ \([\d.]+-[\d.]+\) ", cell) for cells in rows for cell in cells[3:])


@pytest.mark.parametrize("rival", command.MODULES)
def test_rival_that_is_installed_steps(rival: str) -> None:
    pytest.importorskip(command.MODULES[rival])
    ways = command.rivals("CartPole-v1", bench.factory("CartPole-v1"), 4)
    assert bench.rate(bench.timed({rival: ways[rival]}, 0.01, 1)[rival]) > 0
