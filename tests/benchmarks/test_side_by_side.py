"""``python -m side_by_side``: every way is timed and printed; how fast each is, fails no test."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from side_by_side import __main__ as command
from side_by_side.contest import MeasuredContest
from side_by_side.entrant import Task
from side_by_side.rivals import FORKING, THREADED, Rival

STEPPING = [
    "env alone",
    "AsyncVectorEnv",
    "SyncVectorEnv",
    "private hub",
    "private, wire",
    "hub over ipc",
    "hub over tcp",
]
WAYS = [*STEPPING, "pyzmq echo", "pyzmq one-way"]
ROOT = Path(__file__).parents[2]
RIVALS = tuple(rival.name for rival in FORKING + THREADED)


def printed(*arguments: str, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    command.main([*arguments, "--seconds", "0.01"], console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


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
    text = printed("CartPole-v1", "-n", "1,3", "--repeats", "2")
    lines = [line.strip() for line in text.splitlines()]
    for size in ("1 env", "3 envs"):
        start = lines.index(size) + 1
        ours = [line for line in lines[start : lines.index("", start)] if not line.startswith(RIVALS)]
        assert [line.split("  ")[0] for line in ours] == WAYS
        assert [line.split()[-1][-1] for line in ours[: len(STEPPING)]] == ["x"] * len(STEPPING)
    assert "…" not in text and "cores" in text and "gymnasium 1" in text


@pytest.mark.parametrize("rival", FORKING + THREADED, ids=lambda rival: rival.module)
def test_rival_that_is_installed_steps(rival: Rival) -> None:
    pytest.importorskip(rival.module)
    with MeasuredContest(Task("CartPole-v1", 4)) as contest:
        contest.add_rival(rival)
        assert contest.failures == {}
        assert contest.measure(0.01, 1)[rival.name].summary.rate > 0
