"""``envhub bench``: every way is timed and compared; how fast each is, fails no test."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_client.tools import bench
from envhub_client.tools.bench import Result
from gymnasium.vector import AsyncVectorEnv
from rich.console import Console

from envhub.cli import serve
from envhub.errors import RequestRefused

WAYS = ["AsyncVectorEnv", "SyncVectorEnv", "private hub", "hub over ipc", "hub over tcp"]
OWN_ENV = """
import gymnasium

def make():
    return gymnasium.make("CartPole-v1")
"""


@pytest.mark.long
def test_bench_prints_every_way_for_every_number_of_envs_and_which_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVHUB_ADDRESS", "tcp://127.0.0.1:1")  # which is not to be timed
    printed = io.StringIO()
    bench.run(Console(file=printed, width=80), ["CartPole-v1"], [1, 3], 0.01, 2)
    lines = [line.strip() for line in printed.getvalue().splitlines()]
    assert [way for line in lines for way in WAYS if re.match(rf"{way} +\d", line)] == WAYS * 2
    verdicts = [line for line in lines if re.match(rf"({'|'.join(WAYS)}) is fastest", line)]
    assert len(verdicts) == 2
    assert all("SyncVectorEnv takes" in verdict and "AsyncVectorEnv takes" in verdict for verdict in verdicts)
    assert "…" not in printed.getvalue() and "cores" in lines[-1] and "gymnasium 1" in lines[-1]


@pytest.mark.long
def test_bench_times_a_factory_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env_of_mine.py").write_text(OWN_ENV)
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    bench.run(Console(file=printed, width=80), ["mine=env_of_mine:make"], [2], 0.02, 2)
    assert [way for way in WAYS if re.search(rf"(?m)^ *{way} +\d", printed.getvalue())] == WAYS


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
    with contextlib.closing(bench.factory("gymnasium:CartPole-v1")()) as env:
        assert env.spec is not None and env.spec.id == "CartPole-v1"


def test_env_that_waits_is_told_from_one_that_computes_by_the_time_that_its_process_takes() -> None:
    step_us, computes = bench.one_env_us(bench.factory("CartPole-v1"))
    assert 0 < step_us < 1e5 and isinstance(computes, bool)


def result(*rates: float, processes: int = 0, batch_us: float = 100.0, envs_us: float = 80.0) -> Result:
    return Result(processes, [*rates], batch_us, envs_us)


def test_fastest_way_is_named_with_its_processes_and_times_and_what_came_before_it_in_a_repeat() -> None:
    ways = {
        "AsyncVectorEnv": result(20_000, 25_000, processes=16, batch_us=711),
        "SyncVectorEnv": result(50_000, 60_000, batch_us=291, envs_us=160),
        "private hub": result(100_000, 100_000, processes=2, batch_us=160),
        "hub over ipc": result(60_000, 120_000, processes=2),
    }
    assert bench.verdict(16, ways) == (
        "private hub is fastest, but hub over ipc came before it in a repeat. 2 processes step up to 8 envs each. "
        "private hub takes 160 µs for a step of all envs: 80 µs for the envs and 80 µs of its own. "
        "SyncVectorEnv takes 291 µs for a step of all envs: 160 µs for the envs and 131 µs of its own. "
        "AsyncVectorEnv takes 711 µs for a step of all envs: 80 µs for the envs and 631 µs of its own."
    )
    assert bench.ratios(ways["private hub"], ways["AsyncVectorEnv"]) == [4.5, 4.0, 5.0]


class Async(AsyncVectorEnv):
    """One with four envs in no processes."""

    def __init__(self) -> None:
        self.num_envs = 4


def test_envs_that_compute_share_the_cpus_and_those_that_wait_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(Async, "__del__", lambda _: None)
    times = [np.array([100e-6])]
    assert [bench._result(Async(), times, 10.0, computes).envs_us for computes in (True, False)] == [20.0, 10.0]


def test_table_of_the_largest_numbers_fits_into_80_columns() -> None:
    printed = io.StringIO()
    rates = {"AsyncVectorEnv": 950.0, "private hub": 9_999_999.0, "hub over tcp": 0.9}
    results = {way: result(rate / 3, rate, rate * 3, processes=1024) for way, rate in rates.items()}
    Console(file=printed, width=80).print(bench.table("busy", results))
    assert "…" not in printed.getvalue() and "9,999,999" in printed.getvalue()


@pytest.mark.parametrize("wrong", [{"num_envs": ""}, {"num_envs": "0"}])
def test_bench_refuses_numbers_that_measure_nothing(wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.bench(["CartPole-v1"], **wrong)
    assert ended.value.code == 2 and "envhub bench: -n takes numbers of envs" in capsys.readouterr().err
