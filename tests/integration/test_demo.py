"""``envhub demo`` and the example program it runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from envhub_client.tools import cem_cartpole
from envhub_client.tools.bench import served_hub
from hubs import wait_until

from envhub.errors import HubUnreachable

EXAMPLE = Path(__file__).parents[2] / "client/examples/cem_cartpole.py"
MARK = "ENVHUB_TEST_MARK"


def start(*command: str) -> tuple[subprocess.Popen[str], str]:
    """A program with a mark in its environment, by which whatever it starts can be found."""
    mark = uuid.uuid4().hex
    environ = {key: value for key, value in os.environ.items() if key != "ENVHUB_ADDRESS"}
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environ, "COLUMNS": "120", "PYTHONUNBUFFERED": "1", MARK: mark},
    )
    return process, mark


def marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _has_mark(process, mark)]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(MARK) == mark)
    except psutil.Error:  # it has ended, or is another user's
        return False


@pytest.mark.chaos
def test_example_learns_in_a_private_hub() -> None:
    process, mark = start(str(EXAMPLE), "--seed", "3")
    printed, _ = process.communicate(timeout=110)
    assert process.returncode == 0, printed
    returned = float(printed.rsplit("mean return ", 1)[1].split()[0])
    assert returned > 475
    assert wait_until(lambda: not marked(mark)), marked(mark)


@pytest.mark.long
def test_example_of_half_batches_compares_them() -> None:
    process, mark = start(str(EXAMPLE.with_name("half_batches.py")), "--seconds", "0.1")
    printed, _ = process.communicate(timeout=110)
    assert process.returncode == 0 and re.search(r"half batches [\d,]+ env-steps/s: [\d.]+x", printed), printed
    assert wait_until(lambda: not marked(mark)), marked(mark)


@pytest.mark.long
def test_example_of_planners_plans_by_both_interfaces() -> None:
    process, mark = start(str(EXAMPLE.with_name("planner.py")), "--steps", "5")
    printed, _ = process.communicate(timeout=110)
    assert process.returncode == 0 and "up for 5 of 5 steps" in printed, printed
    assert len(printed.rsplit("across the lake: ", 1)[1].split()) == 6, printed
    assert wait_until(lambda: not marked(mark)), marked(mark)


def test_demo_runs_the_example_itself() -> None:
    assert Path(cem_cartpole.__file__).read_text() == EXAMPLE.read_text()


@pytest.mark.timeout(120)
@pytest.mark.long
def test_demo_learns_and_compares_and_leaves_no_process() -> None:
    process, mark = start("-m", "envhub", "demo")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert "a hub serves CartPole-v1 at tcp://127.0.0.1:" in printed
    for way in ("hub over tcp", "hub over ipc", "AsyncVectorEnv"):
        assert re.search(rf"^ *{way} +\d+ +[\d,]+ ", printed, re.M), printed
    assert wait_until(lambda: not marked(mark)), marked(mark)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_no_process(number: int) -> None:
    process, mark = start("-m", "envhub", "demo")
    assert process.stdout is not None
    while "learning" not in process.stdout.readline():
        assert process.poll() is None
    assert len(marked(mark)) > 1  # the hub's, too
    process.send_signal(number)
    printed, _ = process.communicate(timeout=30)
    # CPython before 3.12 ends itself by the signal where that came in the middle of an ``exec``, as in some imports.
    assert process.returncode in (128 + number, -number), printed
    assert wait_until(lambda: not marked(mark)), marked(mark)


def test_hub_that_cannot_serve_prints_why() -> None:
    with pytest.raises(HubUnreachable, match="should read name=module:factory"), served_hub("no=thing:"):
        pass
