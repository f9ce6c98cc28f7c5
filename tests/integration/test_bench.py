"""``envhub bench``: every way is timed and printed; how fast each is, is nobody's business here."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from envhub_client import bench
from envhub_client.timing import interleave, summarize
from rich.console import Console

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
RIVALS = ()


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


@pytest.mark.parametrize(("sizes", "seconds", "repeats"), [([], 1.0, 1), ([0], 1.0, 1), ([1], 0.0, 1), ([1], 1.0, 0)])
def test_bench_refuses_numbers_that_measure_nothing(sizes: list[int], seconds: float, repeats: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bench.run(Console(file=io.StringIO()), ["CartPole-v1"], sizes, seconds, repeats)


def test_summary_is_the_median_of_repeats_and_percentiles_of_all_steps() -> None:
    summary = summarize(10, [np.full(4, 0.001), np.full(2, 0.002), np.full(1, 0.004)])
    assert (summary.rate, summary.slowest, summary.fastest) == pytest.approx((5000, 2500, 10000))
    assert summary.p50_us == pytest.approx(1000)
    assert 2000 < summary.p99_us <= 4000


def test_repeats_are_interleaved_and_every_way_steps_at_least_once() -> None:
    calls: list[str] = []
    told: list[str] = []
    found = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0.0, 3, told.append)
    assert {way: len(repeats) for way, repeats in found.items()} == {"a": 3, "b": 3}
    # one warm-up and one timed step each time
    assert calls == ["a", "a", "b", "b"] * 3
    assert told == ["", "a", "", "b"] * 3
