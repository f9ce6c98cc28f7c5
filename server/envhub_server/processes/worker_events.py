"""The events of a worker's process: its start, its messages, and its exit with its cause."""

from __future__ import annotations

import contextlib
import enum
import signal
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")


class OutOfMemory(enum.Enum):
    """The kernel's part in a SIGKILL, for lack of memory."""

    NO = ""
    PERHAPS = ", perhaps out of memory"
    YES = ": the kernel killed it, out of memory"


@dataclass(frozen=True)
class ExitCause:
    """The cause of a worker's exit."""

    how: str  # words that follow the worker's name, such as "exited with status 3"
    signal: str = ""  # the name of the signal that ended the worker; empty if it exited by itself
    status: int | None = None  # the exit status, if it exited by itself
    log_tail: str = ""  # the last of its stdout, followed by the last of its stderr
    unready: str = ""  # why its interpreter cannot be used, to be told in a line; empty if it can
    started: bool = True  # whether there was a worker at all


def counter(file: Path, name: str) -> int | None:
    """The number after ``name`` in a file of the kernel with a name and a number per line; None if it has none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = file.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)
    return None


def exit_cause(code: int, out_of_memory: OutOfMemory, remark: str, log_tail: str) -> ExitCause:
    if code >= 0:
        return ExitCause(f"exited with status {code}{remark}", "", code, log_tail)
    name = signal_name(-code)
    return ExitCause(f"was ended by {name}{out_of_memory.value}{remark}", name, None, log_tail)


def signal_name(number: int) -> str:
    """The name of a signal; most real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class MemoryKills:
    """Counts the processes that the kernel killed for lack of memory."""

    def __init__(self, own: Path | None, everywhere: Path = VMSTAT) -> None:
        """Read the counters of this process's cgroup, as ``own_counters`` finds them, and of the whole machine."""
        self._own_file, self._everywhere_file = own, everywhere
        self._own, self._everywhere = _oom_kills(own), _oom_kills(everywhere)
        self._unexplained = 0

    def forget(self) -> None:
        """Forget the kills so far, which cannot be of workers that start later."""
        self._read_counters()
        self._unexplained = 0

    def explain(self) -> OutOfMemory:
        """Tell if the kernel killed the worker that was just reaped; every counted kill explains one worker."""
        before = self._everywhere
        self._read_counters()
        if self._unexplained:
            self._unexplained -= 1
            return OutOfMemory.YES
        # The whole machine's counter may have counted another container's process, but never misses one.
        return OutOfMemory.PERHAPS if before is None or before != self._everywhere else OutOfMemory.NO

    def _read_counters(self) -> None:
        own = _oom_kills(self._own_file)
        if own is not None and self._own is not None:
            self._unexplained += max(0, own - self._own)
        self._own, self._everywhere = own, _oom_kills(self._everywhere_file)


def own_counters(own_cgroups: Path = OWN_CGROUPS, cgroups: Path = CGROUPS) -> Path | None:
    """The file of counters of this process's cgroup: v2 or v1, seen from within a container or from outside."""
    try:
        lines = [line.split(":", 2) for line in own_cgroups.read_text().splitlines()]
    except OSError:
        return None
    candidates = []
    for _, controllers, path in lines:
        place = path.lstrip("/")
        if not controllers:
            candidates += [cgroups / place / "memory.events", cgroups / "memory.events"]
        if "memory" in controllers.split(","):
            folder = cgroups / "memory"
            candidates += [folder / place / "memory.oom_control", folder / "memory.oom_control"]
    return next((file for file in candidates if _oom_kills(file) is not None), None)


def _oom_kills(file: Path | None) -> int | None:
    return None if file is None else counter(file, "oom_kill")


@dataclass(frozen=True)
class WorkerStarted:
    """The process of this number runs, with this id."""

    process: int
    pid: int


@dataclass(frozen=True)
class WorkerSaid:
    """A process has sent a control message; it is well-formed, and its numbers are within their bounds."""

    process: int  # its number in its session
    message: Any  # the control message
    current: bool = True  # False for a message about a step or reset of a row that is not the row's last one


@dataclass(frozen=True)
class WorkerExited:
    """A process was reaped, or will never exist: its last event."""

    process: int  # its number in its session
    cause: ExitCause  # why it ended
    unread: Any = None  # the last message that was sent to it, if it is known that the worker had not read all of it


WorkerEvent = WorkerStarted | WorkerSaid | WorkerExited
# Events, each with the number of its session, in the order in which they happened. The hub's loop takes them out; an
# object that puts one in is never called back.
Events = deque[tuple[int, Any]]
