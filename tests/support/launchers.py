"""Envs that start processes, print, and harm the process they run in; a hub finds them as ``name=launchers:Name``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import sims

from envhub.process import STACKS

KINDS = ("group", "session", "stripped", "hidden", "daemon", "forked")


def launch(kind: str) -> int:
    """Start a process that lives for ever, and return its number."""
    if kind == "group":
        return subprocess.Popen(["sleep", "600"]).pid
    if kind == "session":
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    if kind == "stripped":  # of its environment, and in a group of its own
        return os.posix_spawnp("sleep", ["sleep", "600"], {}, setpgroup=0)
    if kind == "hidden":  # and in a session of its own
        return os.posix_spawnp("sleep", ["sleep", "600"], {}, setsid=True)
    if kind == "daemon":  # its parent ends, so it is an orphan from the start
        shell = ["setsid", "sh", "-c", "sleep 600 >&- 2>&- & echo $!"]
        return int(subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout)
    return fork_daemon()


def fork_daemon() -> int:
    """A daemon made as by hand: forked twice, in a session of its own, without exec."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(writing, b"%d" % os.getpid())
            os.close(writing)
            time.sleep(600)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        return int(pipe.read())


class Launcher(sims.Counter):
    """Starts processes of every kind, notes their numbers, and then hangs in one of its functions."""

    def __init__(self, place: str, hangs: str = "") -> None:
        super().__init__()
        self.place, self.hangs = place, hangs
        noted = Path(place, f"{os.getpid()}.new")
        noted.write_text(" ".join(str(launch(kind)) for kind in KINDS))
        noted.rename(Path(place, str(os.getpid())))
        self.hang("init")

    def hang(self, function: str) -> None:
        if self.hangs == function:
            Path(self.place, f"{os.getpid()}.hangs").touch()
            time.sleep(600)

    def reset(self, **arguments: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.hang("reset")
        return super().reset(**arguments)

    def act(self, action: int) -> None:
        self.hang("step")


class Passing(sims.Counter):
    """Leaves processes behind that soon end by themselves."""

    def act(self, action: int) -> None:
        for _ in range(5):
            subprocess.run(["setsid", "sh", "-c", "sleep 0.05 &"], check=True)


class Loud(sims.Counter):
    """Prints as many blocks of a megabyte as its action says."""

    def act(self, action: int) -> None:
        block = b"-" * 79 + b"\n"
        for _ in range(action):
            sys.stdout.buffer.write(block * (1_000_000 // len(block)))
        sys.stdout.flush()


class Shut(sims.Counter):
    """Has no standard streams, and forks in every step."""

    def __init__(self) -> None:
        super().__init__()
        for descriptor in range(3):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def act(self, action: int) -> None:
        if os.fork() == 0:
            time.sleep(600)


class Stuck(sims.Counter):
    """Sleeps in a C function that keeps the interpreter's lock."""

    def __init__(self) -> None:
        super().__init__()
        signal.signal(STACKS, signal.SIG_IGN)
        sys.stderr = sys.stdout

    def act(self, action: int) -> None:
        if action:
            sleep_with_the_lock()


def sleep_with_the_lock() -> None:
    print("about to sleep")
    while True:  # a signal wakes it
        ctypes.PyDLL(None).sleep(600)


def made_stuck() -> Any:
    sleep_with_the_lock()


def segfault() -> Any:
    ctypes.string_at(0)


def exit_with_3() -> Any:
    print("-" * 20000)
    print("so long", file=sys.stderr)
    os._exit(3)
