"""Signals that a batch system sends to every process of a job mean the program, or the served hub."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import sims
from hubs import lives, serve, wait_until

import envhub
from envhub.process import JOB_SIGNALS, STACKS

PROGRAM = """
import os, signal, sys, threading
import psutil
import sims
from envhub.process import JOB_SIGNALS, STACKS
import envhub

def nothing(*_): pass

def signal_all(numbers):
    for process in psutil.Process().children(recursive=True):
        for number in numbers:
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                pass

def storm():
    while not started.is_set():
        signal_all({each for each in numbers if each < signal.SIGRTMIN})  # the kernel queues those above

numbers = JOB_SIGNALS - {STACKS}
for number in numbers:
    signal.signal(number, nothing)
started = threading.Event()
thread = threading.Thread(target=storm, daemon=True)
thread.start()
envs = envhub.AsyncVectorEnv([sims.Counter] * 3, num_workers=3)
envs.reset()
started.set()
thread.join()
pids = envs.call("pid")
for _ in range(20):
    signal_all(numbers)
    _, _, _, truncations, _ = envs.step([0] * 3)
    assert not truncations.any()
assert envs.call("pid") == pids
print(*(process.pid for process in psutil.Process().children(recursive=True)))
"""


@pytest.mark.long
def test_signals_to_all_processes_of_a_program_end_nothing_and_say_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(sims.__file__).parent, capture_output=True, text=True, timeout=60
    )
    assert (ran.stderr, ran.returncode) == ("", 0)
    pids = [*map(int, ran.stdout.split())]
    assert len(pids) == 6  # the hub, its zygote, what imported the envs, and the workers, which end with their program
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.long
def test_hub_whose_workers_get_its_signal_too_lets_them_close_their_envs(tmp_path: Path) -> None:
    with serve(
        tmp_path, "writes=test_job_signals:WritesWhenClosed", environ={"PYTHONPATH": str(Path(__file__).parent)}
    ) as hub:
        with closing(envhub.make_vec("writes", 2, hub=hub.ipc, num_workers=2, folder=str(tmp_path))) as envs:
            envs.reset()
            below = psutil.Process(hub.process.pid).children(recursive=True)
            for process in below:  # the proxy and the zygote, too
                for number in JOB_SIGNALS - {STACKS}:
                    process.send_signal(number)
            assert not envs.step([0, 0])[3].any()
            for process in [*below, psutil.Process(hub.process.pid)]:
                with suppress(psutil.NoSuchProcess):  # it may have ended with the one before
                    process.send_signal(signal.SIGTERM)
            assert hub.process.wait(15) == 0
        assert len([*tmp_path.glob("closed-*")]) == 2
        assert not any(map(lives, below))
        assert "killed" not in hub.log and "Traceback" not in hub.log


class WritesWhenClosed(sims.Counter):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def close(self) -> None:
        (self.folder / f"closed-{os.getpid()}").touch()


class Starter(sims.Counter):
    """Starts processes, which its code ends by SIGTERM, and handles a signal itself."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: self.heard.append(number))

    def ends(self) -> tuple[list[int | None], list[int]]:
        program = subprocess.Popen(["sleep", "600"])
        script = subprocess.Popen(["/bin/sh", "-c", "sleep 600 & wait"])
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        forked.start()
        for process in (program, script, forked):
            process.terminate()
        forked.join(10)
        interrupted = subprocess.Popen(["sleep", "600"])
        interrupted.send_signal(signal.SIGINT)
        statuses = [program.wait(10), script.wait(10), forked.exitcode, interrupted.wait(10)]
        asyncio.run(asyncio.sleep(0))  # which handles SIGINT meanwhile
        for number in (signal.SIGUSR1, signal.SIGINT):
            os.kill(os.getpid(), number)
        return statuses, self.heard


@pytest.mark.filterwarnings("ignore:.*fork")
def test_env_ends_what_it_has_started_and_handles_signals_itself() -> None:
    with closing(envhub.AsyncVectorEnv([Starter])) as envs:
        statuses, heard = envs.call("ends")[0]
    assert statuses == [-signal.SIGTERM] * 3 + [-signal.SIGINT] and heard == [signal.SIGUSR1]
