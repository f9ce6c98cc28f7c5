"""A process per env is cheap: what is counted of it. How quick it is, ``tests/benchmarks`` says."""

from __future__ import annotations

import math
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
from envhub_client.private_hub.process import private_hub
from hubs import below, worker_processes

import envhub
from envhub.arena.spin import HAS_FENCE

NUM_ENVS = 8
WARM_STEPS = 100  # after which a worker looks at its clocks in one step of 16
STEPS = 320
MEMORY_RATIO_MAX = 1.7  # today 1.55; 2.0 where each worker warms up by itself


@pytest.fixture
def envs() -> Iterator[envhub.HubVectorEnv]:
    with closing(envhub.make_vec("CartPole-v1", NUM_ENVS, num_workers=NUM_ENVS)) as made:
        made.reset(seed=1)
        for _ in range(WARM_STEPS):
            made.step(np.zeros(NUM_ENVS, np.int64))
        yield made


def workers() -> list[psutil.Process]:
    return worker_processes(private_hub().pid)


def reads_and_writes(process: psutil.Process) -> tuple[int, int]:
    lines = dict(line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text().splitlines())
    return int(lines["syscr"]), int(lines["syscw"])


def test_worker_reads_nothing_and_writes_at_most_one_ring_for_each_step(envs: envhub.HubVectorEnv) -> None:
    processes = workers()
    assert len(processes) == NUM_ENVS
    before = [reads_and_writes(process) for process in processes]
    for _ in range(STEPS):
        envs.step(np.zeros(NUM_ENVS, np.int64))
    rings = 0
    for process, (reads, writes) in zip(processes, before, strict=True):
        reads_after, writes_after = reads_and_writes(process)
        assert reads_after - reads <= STEPS // 4  # of its clocks, and of what the hub asks now and then
        assert writes_after - writes <= STEPS + STEPS // 16
        rings += writes_after - writes
    # Mostly the last one to end rings. None does where the driver, which was not parked yet, has begun the next step
    # before that one has looked whether it is the last.
    assert STEPS - STEPS // 16 <= rings <= (STEPS * NUM_ENVS // 2 if HAS_FENCE else math.inf)


MEMORY = f"""
import statistics
import gymnasium, numpy, psutil
import envhub

def stepped(kind, **options):
    envs = kind([lambda: gymnasium.make("CartPole-v1")] * {NUM_ENVS}, **options)
    envs.reset(seed=1)
    envs.step(numpy.zeros({NUM_ENVS}, int))
    return envs

def median(processes):
    return statistics.median(process.memory_full_info().uss for process in processes)

theirs = stepped(gymnasium.vector.AsyncVectorEnv)
forked = median(psutil.Process(process.pid) for process in theirs.processes)
theirs.close()
ours = stepped(lambda _, **options: envhub.make_vec("CartPole-v1", {NUM_ENVS}, **options), num_workers={NUM_ENVS})
below = psutil.Process().children(recursive=True)
print(median(process for process in below if process.name() == "envhub-worker") / forked)
ours.close()
"""


@pytest.mark.long
def test_worker_has_not_much_more_for_itself_than_one_that_a_program_forks() -> None:
    """In a program of its own: what else a process of tests has imported and registered counts, too."""
    ran = subprocess.run([sys.executable, "-c", MEMORY], stdout=subprocess.PIPE, text=True, check=True)
    assert float(ran.stdout) <= MEMORY_RATIO_MAX


def test_hub_and_workers_are_in_the_session_of_their_program_and_in_groups_of_their_own(
    envs: envhub.HubVectorEnv,
) -> None:
    hub = psutil.Process(private_hub().pid)
    processes = [hub, *workers(), *(psutil.Process(pid) for pid, _ in below(hub))]
    assert {os.getsid(process.pid) for process in processes} == {os.getsid(0)}
    assert {os.getpgid(process.pid) for process in processes} == {process.pid for process in processes}


ON_A_TERMINAL = """
import fcntl, sys, termios, time
fcntl.ioctl(sys.stdin, termios.TIOCSCTTY, 0)
import envhub, psutil
envs = envhub.make_vec("CartPole-v1", 2, num_workers=2)
envs.reset(seed=1)
everybody = psutil.Process().children(recursive=True)
try:
    print(len(everybody), {process.terminal() for process in everybody}, flush=True)
    while True:  # a signal that comes just before ``signal.pause`` would not end it
        time.sleep(0.1)
except KeyboardInterrupt:
    envs.step([0, 0])
    print("stepped", flush=True)
"""


@pytest.mark.long
def test_ctrl_c_on_the_terminal_is_for_the_program_only() -> None:
    ours, theirs = pty.openpty()
    code = [sys.executable, "-c", ON_A_TERMINAL]
    program = subprocess.Popen(code, stdin=theirs, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with closing(open(ours, "wb", buffering=0)) as terminal, program:
        os.close(theirs)
        assert program.stdout is not None
        assert program.stdout.readline() == "4 {None}\n"  # the hub, its zygote and two workers
        terminal.write(b"\x03")
        assert program.stdout.readline() == "stepped\n"
