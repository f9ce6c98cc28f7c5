"""What the envs of workers started and left behind, found by reading ``/proc``.

A process is known to be a worker's by its session, which a child may leave, and by a mark in its environment,
``ENVHUB_WORKER=<hub>:<pid of the worker>``. Children inherit the mark whether they exec or not, since a worker writes
it over the mark of the zygote that it was forked from, where the kernel reads a process's environment. Only an exec
with an emptied environment and in a session of its own escapes.

Used by the hub while it lives, and by its zygote once the hub is dead. Python 3.8 and later, nothing but its library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass

VARIABLE = "ENVHUB_WORKER"
NO_WORKER = 0  # in the mark of a zygote, and of what it forks until that is a worker
END_TIMEOUT_S = 5.0
END_POLL_S = 0.005

_PID_DIGITS = 10


def mark(hub: str, worker: int) -> str:
    """The value of ``ENVHUB_WORKER`` for a worker of that hub; its length does not depend on the worker."""
    return f"{hub}:{worker:0{_PID_DIGITS}d}"


class Mark:
    """The mark of this process, made before anything changes its environment."""

    def __init__(self) -> None:
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        self._place = getenv(VARIABLE.encode())
        self.hub = os.environ[VARIABLE].partition(":")[0]

    def renew(self, worker: int) -> None:
        """Mark this process, and what it will start, as that worker."""
        value = mark(self.hub, worker)
        ctypes.memmove(self._place, value.encode(), len(value))
        os.environ[VARIABLE] = value


@dataclass(frozen=True)
class Process:
    """A process as ``/proc/PID/stat`` tells of it."""

    pid: int
    ended: bool  # and waits to be reaped
    parent: int
    group: int
    session: int


def look(pid: int) -> Process | None:
    """The process of this number, if there is one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name stands in parentheses and may hold any byte, these too.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Process(pid, fields[0] in (b"Z", b"X"), *map(int, fields[1:4]))


def marked(pid: int) -> tuple[str, int] | None:
    """The hub and the worker that a process is marked with; None for one without mark, or of another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return None
    wanted = VARIABLE.encode() + b"="
    for variable in variables:
        if variable.startswith(wanted):
            hub, _, worker = variable[len(wanted) :].decode("ascii", "replace").partition(":")
            return (hub, int(worker)) if worker.isdigit() else None
    return None


def children(pid: int) -> list[int]:
    """The processes whose parent is that one, the ended ones that it has not reaped among them."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:
        # It has ended, or this kernel keeps no such lists.
        every = map(look, _pids()) if os.path.exists(f"/proc/{pid}") else ()
        return [process.pid for process in every if process is not None and process.parent == pid]
    return found


def below(pid: int) -> list[int]:
    """The children of a process, theirs, and so on."""
    found = children(pid)
    for child in found:  # which grows meanwhile
        found += children(child)
    return found


def end(pid: int) -> None:
    """Kill a process with all that is below it."""
    for number in [pid, *below(pid)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal.SIGKILL)


def end_all(hub: str, workers: set[int]) -> None:
    """Kill the workers and whatever is theirs or of that hub, again and again until there is nothing left to kill."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    looks_in_vain = 0
    # One is not enough: a process that is just about to exec shows no environment.
    while looks_in_vain < 2 and time.monotonic() < deadline_s:
        found = [pid for pid in _pids() if pid != os.getpid() and _is_left(pid, hub, workers)]
        for pid in found:
            end(pid)
        looks_in_vain = 0 if found else looks_in_vain + 1
        time.sleep(END_POLL_S)


def _is_left(pid: int, hub: str, workers: set[int]) -> bool:
    process = look(pid)
    if process is None or process.ended:
        return False
    if process.session in workers or process.group in workers:
        return True
    whose = marked(pid)
    return whose is not None and whose[0] == hub


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
