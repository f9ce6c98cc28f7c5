"""``envhub bench``: every way is timed and printed; how fast each is, is nobody's business here."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_client.tools.bench import bench, plot
from envhub_client.tools.bench.budget import SHARED_HOPS, WIRE_HOPS
from envhub_client.tools.bench.contest import Contest, Result
from envhub_client.tools.bench.entrant import PROCESSES_MAX
from envhub_client.tools.bench.rivals import FORKING, THREADED, Rival
from envhub_client.tools.bench.timing import Summary, interleave, summarize
from rich.console import Console

from envhub import cli

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
RIVALS = tuple(rival.name for rival in FORKING + THREADED)


@pytest.mark.long
def test_bench_prints_every_way_for_every_number_of_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVHUB_ADDRESS", "tcp://127.0.0.1:1")  # not what is to be timed
    printed = io.StringIO()
    bench.run(Console(file=printed, width=80), ["CartPole-v1"], [1, 3], seconds=0.01, repeats=2)
    lines = [line.strip() for line in printed.getvalue().splitlines()]
    for size in ("1 env", "3 envs"):
        start = lines.index(size) + 1
        ours = [line for line in lines[start : lines.index("", start)] if not line.startswith(RIVALS)]
        assert [line.split("  ")[0] for line in ours] == WAYS
        assert [line.split()[-1][-1] for line in ours[: len(STEPPING)]] == ["x"] * len(STEPPING)
    assert "…" not in printed.getvalue()
    assert "cores" in printed.getvalue() and "gymnasium 1" in printed.getvalue()


@pytest.mark.long
def test_bench_prints_json_of_envs_of_its_own() -> None:
    printed = io.StringIO()
    bench.run(Console(file=printed, width=1000), ["busy", "unequal", "images"], [2], 0.02, 1, as_json=True)
    records = [json.loads(line) for line in printed.getvalue().splitlines()]
    assert {record["num_envs"] for record in records} == {2}
    for env in ("busy", "unequal", "images"):
        assert {*WAYS} <= {record["way"] for record in records if record["env"] == env}
    assert all(record["memory_mb"] >= 0 for record in records)  # in this process, freed memory may be enough
    assert all(record["memory_mb"] > 1 for record in records if record["way"] in SEVERAL_PROCESSES)
    busy = {record["way"]: record["rate"] for record in records if record["env"] == "busy"}
    assert busy["SyncVectorEnv"] < 1000 and all(record["cores"] >= 0 for record in records)


@pytest.mark.long
def test_budget_tells_every_hop_of_every_lane() -> None:
    printed = io.StringIO()
    bench.run_budget(Console(file=printed, width=80), ["CartPole-v1"], [2])
    found = {}
    for hop in (*WIRE_HOPS, "step"):
        row = re.search(rf"^ {hop} +([\d, ]+)$", printed.getvalue(), re.M)
        assert row is not None
        found[hop] = [float(number.replace(",", "")) for number in row[1].split()]
        assert len(found[hop]) == (3 if hop in (*SHARED_HOPS, "step") else 2)
    assert all(0 < total < 1e6 for total in found["step"])


def result(rate: float, num_envs: int = 1024, processes: int | None = 1024) -> Result:
    return Result(num_envs, processes, Summary(rate, rate / 3, rate * 3, 1e6 / rate, 1e8 / rate), 3.96, 123456.7)


def test_table_of_the_largest_numbers_fits_into_80_columns() -> None:
    printed = io.StringIO()
    rates = {"AsyncVectorEnv": 950.0, "tianshou Shmem": 9_999_999.0, "hub over tcp": 0.9}
    by_way = {way: result(rate) for way, rate in rates.items()} | {"pyzmq echo": result(5.0, processes=None)}
    Console(file=printed, width=80).print(bench.table("busy", [by_way]))
    assert "…" not in printed.getvalue() and "9,999,999" in printed.getvalue()
    assert max(map(len, printed.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("us", "shown"), [(0.4, "0 µs"), (999.4, "999 µs"), (999.6, "1.00 ms"), (102_400, "102 ms"), (2.5e6, "2.50 s")]
)
def test_durations_have_three_digits(us: float, shown: str) -> None:
    assert bench.duration(us) == shown


def test_without_async_there_is_no_ratio_to_it() -> None:
    (record,) = bench.records("busy", [{"hub over tcp": result(100.0)}])
    assert record["to_async"] is None and record["memory_mb"] == pytest.approx(123456.7)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bench.svg", "bench.png"])
def test_plot_draws_every_env_and_number_of_envs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ways = {"env alone": result(9.0, 2, 0), "hub over tcp": result(50.0, 2, 1), "pyzmq echo": result(1.0, 2, None)}
    results = {"busy": [ways, {**ways, "AsyncVectorEnv": result(20.0, 2, 2)}], "images": [ways]}
    plot.check(tmp_path / name)
    plot.draw(tmp_path / name, results, "on no machine")
    assert (tmp_path / name).stat().st_size > 10_000


def test_plot_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in (tmp_path / "bench.pdf", tmp_path / "nowhere" / "bench.png"):
        with pytest.raises(ValueError, match="--plot"):
            plot.check(path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape('pip install "envhub-rl[bench]"')):
        plot.check(tmp_path / "bench.png")


@pytest.mark.long
def test_without_psutil_bench_names_the_extra_and_demo_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text("raise ModuleNotFoundError(\"No module named 'psutil'\", name='psutil')\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "envhub", "bench", "-n", "1"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.strip().startswith("envhub bench: ")
    assert 'pip install "envhub-rl[bench]"' in done.stderr and "Traceback" not in done.stderr
    command = [sys.executable, "-c", "import envhub_client.tools.demo"]
    subprocess.run(command, env=environ, check=True, timeout=60)


@pytest.mark.parametrize("rival", FORKING + THREADED, ids=lambda rival: rival.module)
def test_rival_that_is_installed_steps(rival: Rival) -> None:
    pytest.importorskip(rival.module)
    with Contest("CartPole-v1", 4) as contest:
        contest.add_rival(rival)
        assert contest.failures == {}
        assert contest.run(0.01, 1)[rival.name].summary.rate > 0


def test_rival_that_is_not_installed_is_left_out() -> None:
    def never(task: object) -> Any:
        raise AssertionError

    with Contest("CartPole-v1", 2) as contest:
        contest.add_rival(Rival("nobody", "no_such_package.vector", never))
        assert contest.ways == [] and contest.failures == {}


def test_rival_that_fails_is_told_in_a_line() -> None:
    def failing(task: object) -> Any:
        raise OSError("no\nwheels")

    with Contest("CartPole-v1", 2) as contest:
        contest.add_rival(Rival("somebody", "json", failing))
        contest.add_alone()
        assert contest.ways == ["env alone"] and contest.failures == {"somebody": "OSError: no"}


def test_ways_with_a_process_for_each_env_end_at_a_limit() -> None:
    def never(task: object) -> Any:
        raise AssertionError

    with Contest("CartPole-v1", PROCESSES_MAX + 1) as contest:
        contest.add_rival(Rival("somebody", "json", never, forks=True))
        assert contest.ways == [] and contest.failures == {}


@pytest.mark.parametrize("wrong", [{"n": ""}, {"n": "0"}, {"seconds": 0.0}, {"repeats": 0}, {"n": "0", "budget": True}])
def test_bench_refuses_numbers_that_measure_nothing(wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.bench.bench(**wrong)
    assert ended.value.code == 2 and "envhub bench: -n takes numbers of envs" in capsys.readouterr().err


def test_summary_is_the_median_of_repeats_and_percentiles_of_all_steps() -> None:
    summary = summarize(10, [np.full(4, 0.001), np.full(2, 0.002), np.full(1, 0.004)])
    assert (summary.rate, summary.slowest, summary.fastest) == pytest.approx((5000, 2500, 10000))
    assert summary.p50_us == pytest.approx(1000)
    assert 2000 < summary.p99_us <= 4000


def test_repeats_are_interleaved_and_every_way_steps_at_least_once() -> None:
    calls: list[str] = []
    ways = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}

    @contextlib.contextmanager
    def noted(what: str, way: str) -> Iterator[None]:
        calls.append(f"{what} {way}")
        yield
        calls.append("end")

    found = interleave(ways, 0.0, 3, functools.partial(noted, "turn"), functools.partial(noted, "measured"))
    assert {way: len(repeats) for way, repeats in found.items()} == {"a": 3, "b": 3}
    # one warm-up and one timed step each time
    turns = [[f"turn {way}", way, f"measured {way}", way, "end", "end"] for way in "ab"]
    assert calls == [*turns[0], *turns[1]] * 3
