"""``envhub bench``: every way is timed and compared; how fast each is, fails no test."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_client.tools.bench import bench, report
from envhub_client.tools.bench.budget import SHARED_HOPS, WIRE_HOPS
from envhub_client.tools.bench.entrant import factory
from envhub_client.tools.bench.result import Result, SizeResults
from envhub_client.tools.bench.timing import Summary, interleave, summarize
from hubs import wait_until
from rich.console import Console

from envhub.cli import commands
from envhub.errors import RequestRefused

WAYS = [
    "AsyncVectorEnv",
    "SyncVectorEnv",
    "private hub",
    "private, wire",
    "hub over ipc",
    "ipc, wire",
    "hub over tcp",
]
OWN_ENV = """
import gymnasium

def make():
    return gymnasium.make("CartPole-v1")
"""


@pytest.mark.long
def test_bench_prints_every_way_for_every_number_of_envs_and_which_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVHUB_ADDRESS", "tcp://127.0.0.1:1")  # which is not to be timed
    printed = io.StringIO()
    bench.run(Console(file=printed, width=80), ["CartPole-v1"], [1, 3], seconds=0.01, repeats=2)
    lines = [line.strip() for line in printed.getvalue().splitlines()]
    for size in ("1 env", "3 envs"):
        start = lines.index(size) + 1
        assert [line.split("  ")[0] for line in lines[start : lines.index("", start)]] == WAYS
        (verdict,) = (line for line in lines if line.startswith(f"{size}: "))
        assert re.match(rf"{size}: ({'|'.join(WAYS)}) is fastest", verdict)
        assert "SyncVectorEnv takes" in verdict and "AsyncVectorEnv takes" in verdict
    assert re.search(r"^Most steps: (1 env|3 envs) by .*, [\d,]+ steps/s\.$", printed.getvalue(), re.MULTILINE)
    assert "…" not in printed.getvalue()
    assert "cores" in printed.getvalue() and "gymnasium 1" in printed.getvalue()


@pytest.mark.long
def test_bench_prints_json_of_a_factory_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env_of_mine.py").write_text(OWN_ENV)
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    bench.run(Console(file=printed, width=1000), ["mine=env_of_mine:make"], [2], 0.02, 2, as_json=True)
    records = [json.loads(line) for line in printed.getvalue().splitlines()]
    assert [record["way"] for record in records] == WAYS
    for record in records:
        assert record["env"] == "mine=env_of_mine:make" and record["num_envs"] == 2
        assert record["ratio_low"] <= record["ratio_median"] <= record["ratio_high"]
        assert len(record["rates"]) == 2 and record["baseline"] == "AsyncVectorEnv"
    assert sum(record["fastest"] for record in records) == 1


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("ALE/*", "an env is an id, module:id or name=module:factory, got 'ALE/*'"),
        ("mine=no_module", "a factory is written module:function, got 'no_module'"),
        ("mine=json:nothing", "there is no factory 'json:nothing'"),
    ],
)
def test_bench_refuses_what_is_no_env_before_a_hub_is_started(entry: str, why: str) -> None:
    with pytest.raises(RequestRefused, match=re.escape(why)):
        bench.run(Console(file=io.StringIO()), [entry], [1], 0.01, 1)


def test_factory_of_an_id_with_its_module_makes_the_env() -> None:
    with contextlib.closing(factory("gymnasium:CartPole-v1")()) as env:
        assert env.spec is not None and env.spec.id == "CartPole-v1"


@pytest.mark.long
def test_budget_tells_every_hop_of_every_lane() -> None:
    printed = io.StringIO()
    bench.run_budget(Console(file=printed, width=80), ["CartPole-v1"], [2])
    hops = {}
    for hop in (*WIRE_HOPS, "step"):
        row = re.search(rf"^ {hop} +([\d, ]+)$", printed.getvalue(), re.M)
        assert row is not None
        hops[hop] = [float(number.replace(",", "")) for number in row[1].split()]
        assert len(hops[hop]) == (3 if hop in (*SHARED_HOPS, "step") else 2)
    assert all(0 < total < 1e6 for total in hops["step"])


# --- the report -------------------------------------------------------------------------------------------------------


def result(*rates: float, processes: int = 0, num_envs: int = 16, sizing: str = "") -> Result:
    batch_us = 1e6 * num_envs / float(np.median(rates))
    return Result(processes, sizing, Summary(rates, batch_us, 3 * batch_us))


def size_results(by_way: dict[str, Result], computes: bool = True, env_us: float = 10.0) -> SizeResults:
    return SizeResults(16, Summary((1e6 / env_us,), env_us, env_us), computes, by_way)


def test_fastest_way_is_named_with_its_ratio_spread_workers_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    ways = {
        "AsyncVectorEnv": result(20_000, 25_000, processes=16),
        "SyncVectorEnv": result(50_000, 60_000),
        "private hub": result(100_000, 100_000, processes=2, sizing="a step took 0.01 ms of CPU"),
    }
    assert report.verdict(size_results(ways)) == (
        "16 envs: private hub is fastest, 4.50 times AsyncVectorEnv (4.00 to 5.00). 2 workers step up to 8 envs each. "
        "private hub takes 160 µs for a batch, 80 µs for the envs and 80 µs of its own. "
        "SyncVectorEnv takes 291 µs for a batch, 160 µs for the envs and 131 µs of its own. "
        "AsyncVectorEnv takes 711 µs for a batch, 80 µs for the envs and 631 µs of its own. "
        "The number of workers: a step took 0.01 ms of CPU."
    )


def test_way_that_was_ahead_in_a_repeat_is_named_with_the_fastest() -> None:
    ways = {
        "AsyncVectorEnv": result(20_000, 20_000, 20_000, processes=16),
        "hub over ipc": result(90_000, 120_000, 80_000, processes=16),
        "private hub": result(100_000, 100_000, 100_000, processes=16),
    }
    results = size_results(ways)
    assert results.as_fast("private hub") == ["hub over ipc"]
    verdict = report.verdict(results)
    assert (
        "private hub is fastest, 5.00 times AsyncVectorEnv (5.00 to 5.00), but hub over ipc came before it" in verdict
    )
    assert "It steps each env in a process of its own." in verdict


def test_without_async_the_ratio_is_to_sync() -> None:
    results = size_results({"SyncVectorEnv": result(100.0), "hub over tcp": result(300.0, processes=1)})
    assert results.baseline == "SyncVectorEnv" and results.ratio("hub over tcp").median == pytest.approx(3.0)
    record = next(bench.records(results))
    assert record["ratio_median"] == 1.0 and record["baseline"] == "SyncVectorEnv" and not record["fastest"]


def test_envs_that_compute_share_the_cpus_and_those_that_wait_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    ways = {"AsyncVectorEnv": result(1000.0, processes=16), "SyncVectorEnv": result(100.0)}
    computing, waiting = size_results(ways, computes=True), size_results(ways, computes=False)
    assert computing.envs_us("AsyncVectorEnv") == 80.0 and waiting.envs_us("AsyncVectorEnv") == 10.0
    assert computing.envs_us("SyncVectorEnv") == waiting.envs_us("SyncVectorEnv") == 160.0


@pytest.mark.parametrize("computes", [True, False])
def test_env_that_waits_is_told_from_one_that_computes(computes: bool) -> None:
    share = bench.BusyShare("env alone")
    with share.measured("hub over tcp"):
        sum(range(100_000))
    assert not share.computes()

    def is_told() -> bool:
        with share.measured("env alone"):
            sum(range(1_000_000)) if computes else time.sleep(0.05)
        return share.computes() == computes

    # Not always at once: on a busy machine the end of a sleep may wait for a CPU for longer than the sleep was.
    assert wait_until(is_told, 10)


def test_table_of_the_largest_numbers_fits_into_80_columns() -> None:
    printed = io.StringIO()
    rates = {"AsyncVectorEnv": 950.0, "private, wire": 9_999_999.0, "hub over tcp": 0.9}
    by_way = {way: result(rate / 3, rate, rate * 3, processes=1024) for way, rate in rates.items()}
    Console(file=printed, width=80).print(report.table("busy", [size_results(by_way, env_us=1e6)]))
    assert "…" not in printed.getvalue() and "9,999,999" in printed.getvalue()
    assert max(map(len, printed.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("us", "shown"), [(0.4, "0 µs"), (999.4, "999 µs"), (999.6, "1.00 ms"), (102_400, "102 ms"), (2.5e6, "2.50 s")]
)
def test_durations_have_three_digits(us: float, shown: str) -> None:
    assert report.duration(us) == shown


@pytest.mark.parametrize(
    "wrong", [{"num_envs": ""}, {"num_envs": "0"}, {"seconds": 0.0}, {"repeats": 0}, {"num_envs": "0", "budget": True}]
)
def test_bench_refuses_numbers_that_measure_nothing(wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.bench.bench(["CartPole-v1"], **wrong)
    assert ended.value.code == 2 and "envhub bench: -n takes numbers of envs" in capsys.readouterr().err


# --- timing -----------------------------------------------------------------------------------------------------------


def test_summary_is_the_median_of_repeats_and_percentiles_of_all_steps() -> None:
    summary = summarize(10, [np.full(4, 0.001), np.full(2, 0.002), np.full(1, 0.004)])
    assert summary.rate == pytest.approx(5000) and summary.rates == pytest.approx((10000, 5000, 2500))
    assert summary.p50_us == pytest.approx(1000)
    assert 2000 < summary.p99_us <= 4000


def test_ratio_is_of_the_same_repeats() -> None:
    ratio = Summary((10.0, 30.0, 80.0), 1.0, 1.0).ratio_to(Summary((10.0, 10.0, 20.0), 1.0, 1.0))
    assert (ratio.median, ratio.low, ratio.high) == (3.0, 1.0, 4.0)


def test_repeats_are_interleaved_and_every_way_steps_at_least_once() -> None:
    calls: list[str] = []
    ways = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}

    @contextlib.contextmanager
    def noted(what: str, way: str) -> Iterator[None]:
        calls.append(f"{what} {way}")
        yield
        calls.append("end")

    times = interleave(ways, 0.0, 3, functools.partial(noted, "turn"))
    assert {way: len(repeats) for way, repeats in times.items()} == {"a": 3, "b": 3}
    # one warm-up and one timed step each time
    turns = [[f"turn {way}", way, way, "end"] for way in "ab"]
    assert calls == [*turns[0], *turns[1]] * 3
