"""A program that ends ends the sessions that it leaves open; the lease is for those that could not say it."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from combinations import each_value
from hubs import ServedHub, serve, stopped, wait_until

import envhub

MAKE = "envs = envhub.make_vec('CartPole-v1', 2, hub={address!r}, **{options!r}); envs.reset(); "
END_S = 60.0  # far beyond what an end may take, and half of the lease here

PROGRAMS = {
    "end": MAKE,
    "exception": MAKE + "1 / 0",
    "exit": MAKE + "sys.exit(3)",
    "interrupt": MAKE + "raise KeyboardInterrupt",
    "cycle": MAKE + "envs.itself = envs",
    "pending": MAKE + "envs.step_async([0, 1])",
    "single": "env = gymnasium.wrappers.TimeLimit(envhub.make('CartPole-v1', hub={address!r}), 5); env.reset()",
    "several": MAKE.replace("{address!r}", "[{address!r}, {other!r}]").replace("'CartPole-v1', 2", "'CartPole-v1', 4"),
    "recreate": MAKE.replace("**", "on_hub_loss='recreate', **"),
    "attached": MAKE + "envs = envhub.connect({address!r}).attach(envs.detach(), **{options!r})",
    "two": MAKE + MAKE.replace("envs", "others"),
    "thread": MAKE + "Thread(target=steps, args=[envs], daemon=True).start(); began.wait()",
    "hanging thread": "envs = envhub.make_vec('slow_close', 1, hub={address!r}, seconds=0, **{options!r}); "
    "envs.reset(); Thread(target=envs.step, args=[[8]], daemon=True).start(); wait_for_step(envs)",
    "forked child": "pid = os.fork(); pid and os.waitpid(pid, 0)\nif not pid:\n  " + MAKE,
    "children": "if __name__ == '__main__':\n for method in ('fork', 'spawn'):\n"
    "  child = get_context(method).Process(target=child_of, args=[{address!r}, {options!r}])\n"
    "  child.start(); child.join()",
}
BEGIN = """
import os, sys, time
from multiprocessing import get_context
from threading import Event, Thread
import gymnasium, envhub
began = Event()
def steps(envs):
    while True:
        envs.step([0, 1])
        began.set()
def wait_for_step(envs):
    while envs._session.pending.state.value != 'step':
        time.sleep(0.01)
def child_of(address, options):
    global envs
    envs = envhub.make_vec('CartPole-v1', 2, hub=address, **options)
    envs.reset()
"""


# The others are for the long run.
QUICK = [("exception", "shared"), ("pending", "shared"), ("pending", "wire"), ("single", "wire"), ("several", "wire")]
QUICK += [("attached", "shared"), ("thread", "shared"), ("children", "wire")]
OTHERS = sorted({*itertools.product(PROGRAMS, ["shared", "wire", "tcp"])} - {*QUICK})


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedHub]]:
    offered = "CartPole-v1", "slow_close=sims:slow_close", "--lease", str(2 * END_S)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serve(tmp_path_factory.mktemp(name), *offered)) for name in ("one", "other")]


def run(folder: Path, program: str, **names: Any) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(BEGIN + program.format(**names))
    return subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=END_S, check=False)


def sessions(hub: ServedHub) -> list[dict[str, Any]]:
    with envhub.connect(hub.ipc) as client:
        return client.sessions()


def free(hub: ServedHub) -> int:
    with envhub.connect(hub.ipc) as client:
        return int(client.stats()["capacity"]["cpus_free"])


@pytest.mark.parametrize(("name", "lane"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.long) for each in OTHERS)])
def test_program_that_ends_ends_its_sessions(name: str, lane: str, hubs: list[ServedHub], tmp_path: Path) -> None:
    hub, other = hubs
    address = hub.tcp if lane == "tcp" else hub.ipc
    options = {"lane": "wire"} if lane == "wire" else {}
    ran = run(tmp_path, PROGRAMS[name], address=address, other=other.ipc, options=options)
    expected = {"exit": 3, "exception": 1, "interrupt": -signal.SIGINT}.get(name, 0)
    assert ran.returncode == expected, ran.stderr
    assert wait_until(lambda: not sessions(hub) and not sessions(other), END_S / 2)
    assert ran.stderr.count("Traceback") == (name in ("exception", "interrupt")), ran.stderr
    # The hub cuts the hanging step short after 1 s, and may say so before the program has ended.
    assert ran.stderr == "" or "Traceback" in ran.stderr or "ended before close was over" in ran.stderr


@pytest.mark.long
def test_programs_in_a_row_leave_the_cpus_free(hubs: list[ServedHub], tmp_path: Path) -> None:
    hub, _ = hubs
    before = free(hub)
    for _ in range(3):
        assert run(tmp_path, PROGRAMS["end"], address=hub.ipc, options={}).returncode == 0
    assert wait_until(lambda: free(hub) == before, END_S / 2)
    with envhub.connect(hub.ipc) as client:
        ended = [(each["by"], each["why"], each["how"]) for each in client.sessions(ended=True)]
    assert ended[-3:] == [("client", "its program ended", "closed")] * 3


LEAVES = {
    "killed": MAKE + "os.kill(os.getpid(), 9)",
    "detached": MAKE + "envs.detach()",
    "child": MAKE + "pid = os.fork(); pid or sys.exit(); os.waitpid(pid, 0); envs.step([0, 1]); envs.detach()",
}


@pytest.mark.parametrize(("name", "lane"), each_value([*LEAVES], ["shared", "wire"], others=pytest.mark.long))
def test_session_outlives_a_program_that_could_not_end_it_or_leaves_it(
    name: str, lane: str, hubs: list[ServedHub], tmp_path: Path
) -> None:
    hub, _ = hubs
    options = {"lane": "wire"} if lane == "wire" else {}
    ran = run(tmp_path, LEAVES[name], address=hub.ipc, options=options)
    assert (ran.returncode, ran.stderr) == (-9 if name == "killed" else 0, "")
    assert wait_until(lambda: [each["leased"] for each in sessions(hub)] == [True])
    with envhub.connect(hub.ipc) as client:
        client.end(sessions(hub)[0]["session"])
    assert wait_until(lambda: not sessions(hub))


@pytest.mark.parametrize(
    ("name", "lane"),
    [
        ("thread", "shared"),
        ("several", "wire"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("end", "shared"), ("end", "wire"))),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("thread", "wire"), ("several", "shared"))),
    ],
)
def test_hub_that_hangs_does_not_hold_up_the_end(name: str, lane: str, hubs: list[ServedHub], tmp_path: Path) -> None:
    hub, other = hubs
    names = {"address": hub.ipc, "other": other.ipc, "options": {"lane": "wire"} if lane == "wire" else {}}
    path = tmp_path / "program.py"
    path.write_text(BEGIN + PROGRAMS[name].format(**names) + "\nprint(1, flush=True); input()")
    with subprocess.Popen([sys.executable, path], stdin=-1, stdout=-1, stderr=-1) as program:
        assert program.stdout is not None
        assert program.stdout.readline()
        with stopped(hub.process.pid):
            _, written = program.communicate(b"\n", END_S)
    assert (program.returncode, written) == (0, b"")
    with envhub.connect(hub.ipc) as client:
        for each in sessions(hub) if name == "thread" else ():  # its connection is in use
            client.end(each["session"])
    assert wait_until(lambda: not sessions(hub) and not sessions(other), END_S / 2)


@pytest.mark.long
@pytest.mark.parametrize("lane", ["shared", "wire"])
def test_envs_close_in_peace_though_their_program_has_ended(lane: str, hubs: list[ServedHub], tmp_path: Path) -> None:
    hub, _ = hubs
    written = tmp_path / "closed"
    program = f"envs = envhub.make_vec('slow_close', hub={hub.ipc!r}, lane={'auto' if lane == 'shared' else lane!r}, "
    ran = run(tmp_path, program.replace("{", "{{") + f"seconds=3.0, path={str(written)!r})")
    assert (ran.returncode, ran.stderr, written.exists()) == (0, "", False)
    assert wait_until(written.exists)
    assert written.read_text() == "whole" and wait_until(lambda: not sessions(hub))
