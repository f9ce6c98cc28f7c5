"""How many workers a session gets, where they run and how they wait, as its user wants it."""

from __future__ import annotations

import io
import logging
import os
import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import sims
from envhub_client.progress import making_bar
from hubs import ServedHub, serve
from rich.console import Console

import envhub

CPUS = len(os.sched_getaffinity(0))


class Slow(sims.Counter):
    def step(self, action: int) -> tuple[Any, ...]:
        end_s = time.thread_time() + 0.005
        while time.thread_time() < end_s:
            pass
        return super().step(action)


class NoRandomActions(sims.Counter):
    def step(self, action: int) -> tuple[Any, ...]:
        if action > 1:
            raise ValueError("not at random")
        return super().step(action)


def test_measured_step_decides_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "envhub")
    with closing(envhub.make_vec([Slow] * 2 * CPUS, num_workers="auto")) as envs:
        assert envs.num_workers == CPUS
        assert envs.reset()[0].shape == (2 * CPUS, 2)
        assert envs.step([1] * 2 * CPUS)[0][:, 0].tolist() == [1] * 2 * CPUS
    told = re.search(rf"{CPUS} workers for {2 * CPUS} envs, since a step of one takes ([\d.e-]+) s", caplog.text)
    assert told and float(told[1]) >= 0.005  # of CPU time; how much more, is the machine
    with closing(envhub.make_vec("CartPole-v1", 1, num_workers="auto")) as envs:
        assert envs.num_workers == 1


class SlowlyMade(sims.Counter):
    def __init__(self) -> None:
        super().__init__()
        time.sleep(1.2)  # so that more than one line tells of it


def test_slow_making_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "envhub")
    printed = io.StringIO()
    with (
        making_bar(Console(file=printed, force_terminal=True, width=80)),
        closing(envhub.make_vec([SlowlyMade] * 3, num_workers=1)) as envs,
    ):
        envs.reset()
    assert re.search(r"is building: [1-3] of 3 envs stand", caplog.text)
    assert "building envs" in printed.getvalue() and "/3" in printed.getvalue()


def test_env_that_takes_no_random_action_gets_the_usual_workers() -> None:
    with closing(envhub.make_vec([NoRandomActions] * CPUS, num_workers="auto")) as envs:
        assert envs.num_workers == max(1, CPUS - 1)
        envs.reset()
        assert envs.step([1] * CPUS)[0][:, 0].tolist() == [1] * CPUS


def test_operator_may_have_every_session_measured(tmp_path: Path) -> None:
    with (
        serve(tmp_path, "CartPole-v1", "--workers", "auto") as hub,
        closing(envhub.make_vec("CartPole-v1", 1, hub=hub.tcp)) as envs,
    ):
        assert envs.num_workers == 1
        envs.reset()
    assert re.search(r"\"step_s\": [0-9.e-]+", hub.log)


def test_pinned_workers_keep_to_one_cpu_each(hub: ServedHub) -> None:
    workers = min(2, CPUS)
    with closing(envhub.make_vec("counter", workers, hub=hub.ipc, num_workers=workers, pin=True)) as envs:
        found = [psutil.Process(pid).cpu_affinity() for pid in envs.call("pid")]
    assert found == [[cpu] for cpu in sorted(os.sched_getaffinity(0))[:workers]]


@pytest.mark.parametrize("spin_us", [0, 1000])
def test_any_spin_steps_alike(address: str | None, spin_us: int) -> None:
    env = [sims.Counter] * 2 if address is None else "counter"
    with closing(envhub.make_vec(env, 2, hub=address, spin_us=spin_us)) as envs:
        envs.reset()
        for count in range(1, 20):
            assert envs.step([1, 1])[0][:, 0].tolist() == [count] * 2


@pytest.mark.parametrize(
    "wrong", [{"spin_us": -1}, {"spin_us": 1001}, {"num_workers": "many"}, {"num_workers": 0}, {"num_workers": 1.5}]
)
def test_wrong_options_are_refused_here(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        envhub.make_vec("CartPole-v1", 2, **wrong)


def test_envs_side_by_side_are_different_workers(hub: ServedHub) -> None:
    with closing(envhub.make_vec("counter", 5, hub=hub.ipc, num_workers=2)) as envs:
        pids = envs.call("pid")
    assert len(set(pids)) == 2 and [pids[0], pids[1]] * 2 + [pids[0]] == list(pids)
