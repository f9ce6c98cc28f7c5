"""Forks of processes that have files, children and pools of threads: they are exact, or refused."""

from __future__ import annotations

import contextlib
import ctypes.util
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from envhub_server.worker.copyable import reopen_files, what_cannot_be_copied

END_S = 60  # of a copy that hangs
CHUNK = 5000  # bytes; more than half of a buffer of Python

SCRIPT = f"""
import ctypes, json, os, signal, sys, threading
from envhub_server.ipc.process_marks import prctl
from envhub_server.worker.copyable import pause_openmp, threads_left, what_cannot_be_copied

def count():
    return len(os.listdir("/proc/self/task"))

def in_copy(call):
    "Fork; the threads that are left in this process, and the result of the call in the copy."
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm({END_S})  # the alarm of the other process is not this one's
        os.write(write, json.dumps(call()).encode())
        os._exit(0)
    left = threads_left()
    os.close(write)
    with open(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return left, text and json.loads(text)

signal.alarm({END_S})
"""


def printed(script: str, *args: str, **variables: str) -> Any:
    command = [sys.executable, "-c", SCRIPT + script, *args]
    run = subprocess.run(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, check=True, timeout=2 * END_S
    )
    return json.loads(run.stdout)


@pytest.fixture
def own() -> set[int]:
    """The descriptors that this process had before the test."""
    # Without the one by which they are listed.
    return {int(each) for each in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{each}")}


@contextlib.contextmanager
def copied(read: Callable[[], Any], own: set[int]) -> Iterator[Callable[[], Any]]:
    """Fork this process, and open its files again in the copy; gives a call of ``read`` there."""
    here, there = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            here.close()
            reopen_files({*own, there.fileno()})
            there.sendall(b'"ready"\n')
            while there.recv(1):
                there.sendall(json.dumps(read()).encode() + b"\n")
        finally:
            os._exit(0)
    there.close()
    try:
        with here, here.makefile() as lines:
            assert lines.readline() == '"ready"\n'

            def read_there() -> Any:
                here.sendall(b"x")
                return json.loads(lines.readline())

            yield read_there
    finally:
        os.waitpid(pid, 0)


def unbuffered(folder: Path) -> Callable[[], Any]:
    file = (folder / "file").open("rb", buffering=0)
    return lambda: file.read(CHUNK).decode()


def deleted(folder: Path) -> Callable[[], Any]:
    read = unbuffered(folder)
    (folder / "file").unlink()
    return read


def buffered(folder: Path) -> Callable[[], Any]:
    return (folder / "file").open().readline


def duplicated(folder: Path) -> Callable[[], Any]:
    """Read from two descriptors in turn, which share their offset."""
    first = os.open(folder / "file", os.O_RDONLY)
    turns = [first, os.dup(first)]

    def read() -> str:
        turns.reverse()
        return os.read(turns[0], CHUNK).decode()

    return read


def two_of_one_file(folder: Path) -> Callable[[], Any]:
    one, other = unbuffered(folder), unbuffered(folder)
    return lambda: [one(), other(), one()]


def listed(folder: Path) -> Callable[[], Any]:
    for number in range(500):
        (folder / f"{number:0200}").touch()  # more names than the C library reads at once
    entries = os.scandir(folder)
    return lambda: [entry.name for entry, _ in zip(entries, range(50), strict=False)]


@pytest.mark.parametrize("opened", [unbuffered, deleted, buffered, duplicated, two_of_one_file, listed])
def test_process_and_its_copy_read_a_file_each_by_itself(
    opened: Callable[[Path], Callable[[], Any]], own: set[int], tmp_path: Path
) -> None:
    lines = (str(number).rjust(CHUNK - 1) + "\n" for number in range(30))
    (tmp_path / "file").write_text("".join(lines))
    refused = what_cannot_be_copied(own)
    read = opened(tmp_path)
    assert what_cannot_be_copied(own) == refused
    before = [read() for _ in range(2)]
    with copied(read, own) as read_there:
        there = [read_there() for _ in range(3)]
        here = [read() for _ in range(3)]
        there += [read_there() for _ in range(4)]
        here += [read() for _ in range(4)]
    assert here == there
    seen = [hashlib.sha256(json.dumps(each).encode()).digest() for each in [*before, *here]]
    assert len({*seen}) == len(seen)  # nothing was read twice


def test_file_that_cannot_be_opened_again_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    script = """
file = open(sys.argv[1])
os.chmod(sys.argv[1], 0)
if not os.getuid():  # root may read every file
    os.setuid(65534)
    prctl(4, 1)  # PR_SET_DUMPABLE, else its descriptors belong to root
signal.alarm(0)
print(json.dumps(what_cannot_be_copied(())))
"""
    assert printed(script, str(file)) == [f"the file {file}, which cannot be opened again (Permission denied)"]


def test_child_process_is_refused_until_it_is_waited_for(own: set[int]) -> None:
    before = what_cannot_be_copied(own)
    with subprocess.Popen(["sleep", "600"]) as child:
        phrases = [f"the child process {child.pid} (sleep)"]
        listed = what_cannot_be_copied(own)
        child.kill()
        assert [each for each in listed if each not in before] == phrases
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert [each for each in what_cannot_be_copied(own) if each not in before] == phrases
    assert what_cannot_be_copied(own) == before


def test_threads_are_named_without_the_harmless_one() -> None:
    script = """
def wait(name):
    prctl(15, name)  # PR_SET_NAME
    named.wait()
    for_ever.wait()

named, for_ever = threading.Barrier(3), threading.Event()
for name in b"SDLTimer", b"simulator":
    threading.Thread(target=wait, args=[name], daemon=True).start()
named.wait()
pause_openmp()
print(json.dumps([in_copy(threads_left), count()]), flush=True)
os._exit(0)
"""
    assert printed(script) == [[["simulator"], []], 3]


@pytest.mark.long
def test_env_that_draws_by_pygame_is_copied() -> None:
    script = """
import gymnasium

env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
env.reset(seed=1)
env.render()
signal.alarm(0)

def draw():
    env.step(1)
    return env.render().tolist()

refused = what_cannot_be_copied(())
left, image = in_copy(draw)
print(json.dumps([refused, left, image == draw()]))
"""
    assert printed(script) == [[], [], True]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenBLAS has no pool of threads on one CPU")
def test_pool_of_openblas_is_gone_after_a_fork_and_comes_back_in_both() -> None:
    script = """
import numpy as np

matrix = np.random.default_rng(1).normal(size=(400, 400))

def multiply():
    return [float((matrix @ matrix).sum()), count()]

expected = multiply()
pause_openmp()
copies = [in_copy(multiply), in_copy(multiply)]
print(json.dumps([copies == [([], expected)] * 2, multiply() == expected, count()]))
"""
    assert printed(script, OPENBLAS_NUM_THREADS="2") == [True, True, 2]


@pytest.mark.skipif(ctypes.util.find_library("gomp") is None, reason="there is no OpenMP of GCC")
def test_pool_of_openmp_is_left_after_a_fork_unless_it_is_paused() -> None:
    script = """
gomp, libc = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(None)

def run():
    gomp.GOMP_parallel(libc.getpid, None, 4, 0)  # a loop whose body needs nothing
    return count()

run()
left, _ = in_copy(int)
paused = []
for _ in range(50):  # a thread that has ended may be listed for a moment
    assert run() == 4
    pause_openmp()
    paused += threads_left()
print(json.dumps([len(left), paused, in_copy(run), run()]))
"""
    library = ctypes.util.find_library("gomp")
    assert library is not None
    assert printed(script, library) == [3, [], [[], 4], 4]
