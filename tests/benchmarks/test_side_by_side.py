"""``python -m side_by_side``: every way is timed and printed; how fast each is, fails no test."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from side_by_side import __main__ as command
from side_by_side import plot
from side_by_side.contest import MeasuredContest, Measurement
from side_by_side.entrant import ALONE, PROCESSES_MAX, Summary, Task, alone_entrant
from side_by_side.report import records, table
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
SEVERAL_PROCESSES = {*WAYS} - {"env alone", "SyncVectorEnv"}
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


@pytest.mark.long
def test_records_of_envs_of_its_own() -> None:
    lines = printed("busy", "unequal", "images", "-n", "2", "--repeats", "1", "--json", width=1000).splitlines()
    records = [json.loads(line) for line in lines]
    assert {record["num_envs"] for record in records} == {2}
    for env in ("busy", "unequal", "images"):
        assert {*WAYS} <= {record["way"] for record in records if record["env"] == env}
    assert all(record["memory_mb"] >= 0 for record in records)  # in this process, freed memory may be enough
    assert all(record["memory_mb"] > 1 for record in records if record["way"] in SEVERAL_PROCESSES)
    busy = {record["way"]: record["rate"] for record in records if record["env"] == "busy"}
    assert busy["SyncVectorEnv"] < 1000 and all(record["cores"] >= 0 for record in records)


def measurement(rate: float, num_envs: int = 1024, processes: int | None = 1024) -> Measurement:
    return Measurement(num_envs, processes, Summary((rate / 3, rate, rate * 3), 1e6 / rate, 1e8 / rate), 3.96, 123456.7)


def test_table_of_the_largest_numbers_fits_into_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    rates = {"AsyncVectorEnv": 950.0, "tianshou Shmem": 9_999_999.0, "hub over tcp": 0.9}
    by_way = {way: measurement(rate) for way, rate in rates.items()} | {"pyzmq echo": measurement(5.0, processes=None)}
    console.print(table("busy", [by_way]))
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert "…" not in text and "9,999,999" in text and max(map(len, text.splitlines())) <= 80


def test_without_async_there_is_no_ratio_to_it() -> None:
    (record,) = records("busy", [{"hub over tcp": measurement(100.0)}])
    assert record["to_async"] is None and record["memory_mb"] == pytest.approx(123456.7)


@pytest.mark.long
@pytest.mark.parametrize("name", ["chart.svg", "chart.png"])
def test_plot_draws_every_env_and_number_of_envs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = {"env alone": (9.0, 0), "hub over tcp": (50.0, 1), "pyzmq echo": (1.0, None)}
    ways = {way: measurement(rate, 2, processes) for way, (rate, processes) in one.items()}
    results = {"busy": [ways, {**ways, "AsyncVectorEnv": measurement(20.0, 2, 2)}], "images": [ways]}
    plot.check(tmp_path / name)
    plot.draw(tmp_path / name, results, "on no machine")
    assert (tmp_path / name).stat().st_size > 10_000


def test_plot_refuses_other_files(tmp_path: Path) -> None:
    for path in (tmp_path / "chart.pdf", tmp_path / "nowhere" / "chart.png"):
        with pytest.raises(ValueError, match="--plot"):
            plot.check(path)


@pytest.mark.parametrize("rival", FORKING + THREADED, ids=lambda rival: rival.module)
def test_rival_that_is_installed_steps(rival: Rival) -> None:
    pytest.importorskip(rival.module)
    with MeasuredContest(Task("CartPole-v1", 4)) as contest:
        contest.add_rival(rival)
        assert contest.failures == {}
        assert contest.measure(0.01, 1)[rival.name].summary.rate > 0


def never(task: object) -> Any:
    raise AssertionError


def test_rival_that_is_not_installed_is_left_out() -> None:
    with MeasuredContest(Task("CartPole-v1", 2)) as contest:
        contest.add_rival(Rival("none", "no_such_package.vector", never))
        assert contest.entrants == {} and contest.failures == {}


def test_failure_of_a_rival_is_kept_as_a_line() -> None:
    def failing(task: object) -> Any:
        raise OSError("no\nwheels")

    task = Task("CartPole-v1", 2)
    with MeasuredContest(task) as contest:
        contest.add_rival(Rival("another", "json", failing))
        contest.add(ALONE, alone_entrant(task))
        assert [*contest.entrants] == ["env alone"] and contest.failures == {"another": "OSError: no"}


def test_ways_with_a_process_for_each_env_end_at_a_limit() -> None:
    with MeasuredContest(Task("CartPole-v1", PROCESSES_MAX + 1)) as contest:
        contest.add_rival(Rival("another", "json", never, forks=True))
        assert contest.entrants == {} and contest.failures == {}
