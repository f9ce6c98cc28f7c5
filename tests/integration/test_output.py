"""What workers print, how much of it, and how they tell of their end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import sims
from envhub_server.processes.worker_output import PATIENCE_S
from hubs import HERE, below, serve, wait_until

import envhub
from envhub.cli import print_line, standard_streams
from envhub.process import STACKS

MIB = 1 << 20
OFFERED = [
    "counter=sims:counter",
    "naughty=sims:naughty",
    *(f"{name.lower()}=launchers:{name}" for name in ("Loud", "Shut", "Stuck")),
]


@pytest.mark.long
def test_prints_of_a_served_hubs_workers_are_events_in_its_own_streams(tmp_path: Path) -> None:
    with serve(tmp_path, *OFFERED) as hub:
        with closing(envhub.make_vec("counter", 2, hub=hub.ipc, num_workers=2)) as envs:
            envs.call("say", 'a "word"')
            pids = envs.call("pid")
            session = envs.token[:8]
        assert hub.process.stdout is not None
        heard = b""
        while heard.count(b"word") < 2:
            assert select.select([hub.process.stdout], [], [], 60)[0], heard
            heard += os.read(hub.process.stdout.fileno(), 4096)
        events = [json.loads(line) for line in heard.splitlines() if b"word" in line]
        assert {each["pid"]: each["worker"] for each in events} == {pid: worker for worker, pid in enumerate(pids)}
        for event in events:
            assert (event["event"], event["session"], event["stream"]) == ("output", session, "stdout")
            assert event["text"] == 'a "word"'


@pytest.mark.long
def test_env_whose_output_has_no_reader_delays_no_session(tmp_path: Path) -> None:
    with (
        serve(tmp_path, *OFFERED) as hub,
        closing(envhub.make_vec("loud", 1, hub=hub.tcp)) as loud,
        closing(envhub.make_vec("counter", 1, hub=hub.tcp)) as other,
    ):
        loud.reset()
        other.reset()
        process = psutil.Process(hub.process.pid)
        before = process.memory_info().rss
        floods = steps = 0
        while steps <= 20 and floods < 3:  # this process may be stalled for as long as a flood takes
            floods, steps, ended = floods + 1, 0, False
            loud.step_async([50])
            while not ended:
                other.step([0])
                steps += 1
                with contextlib.suppress(TimeoutError):
                    loud.step_wait(timeout=0)
                    ended = True
        assert steps > 20
        assert process.memory_info().rss < before + 16 * MIB
        assert loud.step([0])[0][:, 0].tolist() == [floods + 1]


@pytest.mark.long
def test_dropped_output_is_logged_once_a_reader_reads_again(tmp_path: Path) -> None:
    with serve(tmp_path, *OFFERED) as hub, closing(envhub.make_vec("loud", 1, hub=hub.ipc)) as envs:
        envs.reset()
        envs.step([2])
        assert hub.process.stdout is not None
        os.set_blocking(hub.process.stdout.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while os.read(hub.process.stdout.fileno(), MIB):
                pass
        envs.step([1])
        assert wait_until(lambda: "output_dropped" in hub.log)


PRINTING = """
import envhub, launchers
envs = envhub.make_vec([launchers.Loud] * 2, num_workers=2)
envs.reset()
envs.step([3, 3])
envs.close()
"""


@pytest.mark.long
def test_slow_reader_of_a_programs_output_gets_all_of_it() -> None:
    heard, pause_s = _read_slowly()
    for _ in range(4):
        if pause_s < PATIENCE_S:
            break
        heard, pause_s = _read_slowly()  # a reader that is stalled for so long does lose some
    assert pause_s < PATIENCE_S and heard == 6_000_000


def _read_slowly() -> tuple[int, float]:
    """The number of bytes that a program prints, and the longest time for which nothing of it was read."""
    heard, pause_s, read_s = 0, 0.0, math.inf
    with subprocess.Popen([sys.executable, "-c", PRINTING], cwd=HERE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        while chunk := os.read(program.stdout.fileno(), 50_000):
            heard += len(chunk)
            pause_s, read_s = max(pause_s, time.monotonic() - read_s), time.monotonic()
            time.sleep(0.002)
        assert program.wait(30) == 0
    return heard, pause_s


@pytest.mark.long
def test_worker_without_standard_streams_whose_env_forks_does_its_work(tmp_path: Path) -> None:
    with serve(tmp_path, *OFFERED) as hub:
        with closing(envhub.make_vec("shut", 2, hub=hub.ipc, num_workers=1)) as envs:
            envs.reset()
            for count in range(1, 5):
                assert envs.step([0, 0])[0][:, 0].tolist() == [count] * 2
        hub_process = psutil.Process(hub.process.pid)
        assert wait_until(lambda: [name for _, name in below(hub_process, "")] == ["envhub-zygote"])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*while waiting for a pending call")
def test_env_that_hangs_with_the_interpreters_lock_dumps_its_stack(tmp_path: Path) -> None:
    with serve(tmp_path, *OFFERED) as hub:
        envs = envhub.make_vec("stuck", 1, hub=hub.ipc)
        envs.reset()
        (pid,) = envs.call("pid")
        envs.step_async([1])
        assert wait_until(lambda: asks_for_its_stack(pid) and "in sleep_with_the_lock" in hub.log)
        envs.close(terminate=True)


def asks_for_its_stack(pid: int) -> bool:
    os.kill(pid, STACKS)
    time.sleep(0.05)
    return True


def ended(env: str, how: str) -> dict[str, Any]:
    """How the supervisor tells of the end of a worker that makes this env."""
    ran = subprocess.run(
        [sys.executable, str(HERE / "supervised.py"), env, how], capture_output=True, text=True, timeout=60, cwd=HERE
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_log_tail_of_a_worker_that_is_killed_for_hanging_ends_in_its_stack() -> None:
    ending = ended("launchers:made_stuck", "dump")
    assert (ending["how"], ending["signal"], ending["status"]) == ("was ended by SIGKILL", "SIGKILL", None)
    before, _, stack = ending["log_tail"].partition("about to sleep\n")
    assert before == "" and stack.startswith("Current thread") and "in sleep_with_the_lock" in stack


@pytest.mark.long
def test_exit_cause_has_signal_status_and_the_last_output() -> None:
    ending = ended("launchers:segfault", "wait")
    assert (ending["how"], ending["signal"], ending["status"]) == ("was ended by SIGSEGV", "SIGSEGV", None)
    assert "Fatal Python error: Segmentation fault" in ending["log_tail"] and "in segfault" in ending["log_tail"]
    ending = ended("launchers:exit_with_3", "wait")
    assert (ending["how"], ending["signal"], ending["status"]) == ("exited with status 3", "", 3)
    assert ending["log_tail"].endswith("so long\n") and len(ending["log_tail"]) == 16384


def test_worker_is_what_the_kernel_ends_first_and_writes_no_core() -> None:
    with closing(envhub.make_vec([sims.Counter])) as envs:
        (pid,) = envs.call("pid")
        own = int(Path("/proc/self/oom_score_adj").read_text())
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == min(1000, own + 500)
        assert psutil.Process(pid).rlimit(psutil.RLIMIT_CORE)[0] == 0


# --- streams that break -----------------------------------------------------------------------------------------------


COMMAND = [sys.executable, "-m", "envhub"]


@contextmanager
def opened(kind: str) -> Iterator[int]:
    """A descriptor on a full disk, or of a pipe that nobody reads, has no room, or would not wait for room."""
    if kind == "disk":
        descriptors = [os.open("/dev/full", os.O_WRONLY)]
    else:
        reading, writing = os.pipe()
        descriptors = [writing] if kind == "closed" else [writing, reading]
        if kind == "closed":
            os.close(reading)
        else:
            os.set_blocking(writing, False)
            while True:
                try:
                    os.write(writing, bytes(4096))
                except BlockingIOError:
                    break
            os.set_blocking(writing, kind == "full")
    try:
        yield descriptors[0]
    finally:
        for each in descriptors:
            os.close(each)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        "full",
        pytest.param("closed", marks=pytest.mark.long),
        *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("disk", "nonblocking")),
    ],
)
def test_hub_serves_until_it_is_told_to_stop_whatever_becomes_of_its_output(tmp_path: Path, kind: str) -> None:
    address = f"ipc://{tmp_path}/hub.sock"
    command = [*COMMAND, "serve", "CartPole-v1", "--bind", address]
    with opened(kind) as output, subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path) as hub:
        try:
            with closing(envhub.make_vec("CartPole-v1", 1, hub=address)) as envs:
                envs.reset()
                envs.step([0])
            hub.send_signal(signal.SIGTERM)
            assert hub.wait(15) == 0
        finally:
            hub.kill()


def ended_with(arguments: list[str], stdout: int, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    environ = {**os.environ, "COLUMNS": "200"}
    run = subprocess.run([*COMMAND, *arguments], stdout=stdout, stderr=stderr, text=True, timeout=60, env=environ)
    return run.returncode, run.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--help"],
        *(pytest.param(each, marks=pytest.mark.chaos) for each in (["keys", "list", "--keys", "keys"], ["ls"])),
    ],
)
def test_command_whose_output_cannot_be_written_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert ended_with(["keys", "add", "alice", "--keys", "keys"], subprocess.DEVNULL)[0] == 0
    with opened("closed") as output:
        assert ended_with(arguments, output) == (1, "")
    with opened("disk") as output:
        assert ended_with(arguments, output) == (1, "envhub: its output cannot be written: No space left on device\n")


def test_command_waits_for_room_where_another_program_made_its_output_nonblocking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened("nonblocking") as output, open(f"/proc/self/fd/{output}", "rb", 0) as reader:
        reading = threading.Timer(0.05, reader.read, (1 << 20,))
        with open(output, "w", closefd=False) as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            with standard_streams():
                reading.start()
                print_line("line")
        reading.join()
        assert reader.read(1 << 20) == b"line\n"


@pytest.mark.long
def test_status_of_a_command_is_the_same_where_its_error_cannot_be_written(tmp_path: Path) -> None:
    for kind in ("closed", "disk"):
        with opened(kind) as output:
            assert ended_with(["replay", str(tmp_path / "none")], output, output)[0] == 2
