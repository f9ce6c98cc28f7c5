"""Marks by which the processes that envs started are found in ``/proc`` after their worker has ended.

A worker has two marks, which its children inherit:

* ``ENVHUB_WORKER=<hub>:<pid of the worker>`` in its environment. Children have it whether they exec or not, since a
  worker writes it over the mark of the zygote that it was forked from, where the kernel reads a process's environment.
* Its soft limit of CPU time without a pause in real-time scheduling (``RLIMIT_RTTIME``): a number made of the hub's id
  and the worker's pid. It is years long, so it limits nothing. An exec with an empty environment keeps it, in any
  process group and session. Only a lower hard limit prevents a worker from having it.

The hub uses this module while it runs, and its zygote after the hub was killed. The bootstrap executes it before it can
import a package: Python 3.8 and later, standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import signal
import sys
import termios
import time
import warnings

VARIABLE = "ENVHUB_WORKER"
ZYGOTE = "envhub-zygote"  # the name of its process
NO_WORKER = 0  # in the mark of a zygote, and of a forked process before it is a worker
END_TIMEOUT_S = 5.0
END_POLL_S = 0.005
PIDS = 1 << 32  # more than there are process ids
PROCESSES_MAX = 1000  # of one worker that are looked at

_PID_DIGITS = 10

PR_SET_PDEATHSIG = 1
_MUTE = ("ignore", None, Warning, None, 0)

prctl = ctypes.CDLL(None).prctl  # made once in the zygote, so that workers do not each make it on pages of their own


def new_hub() -> str:
    return os.urandom(8).hex()


def mark(hub: str, worker: int) -> str:
    return f"{hub}:{worker:0{_PID_DIGITS}d}"


class Mark:
    """The mark of this process, made before anything changes its environment."""

    def __init__(self) -> None:
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        self._value_at = getenv(VARIABLE.encode())
        self.hub = os.environ[VARIABLE].partition(":")[0]

    def renew(self, worker: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
        with contextlib.suppress(ValueError, OSError):  # the hard limit is lower
            resource.setrlimit(resource.RLIMIT_RTTIME, (_hub_number(self.hub) * PIDS + worker, hard))
        value = mark(self.hub, worker)
        ctypes.memmove(self._value_at, value.encode(), len(value))
        os.environ[VARIABLE] = value


def _read(pid: object, file: str) -> bytes:
    """The contents of a file of ``/proc`` about a process; empty if it has ended, or is another user's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{file}", "rb") as opened:
        return opened.read()
    return b""


def stat(pid: int) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` from the third, the state, on; none if there is no such process."""
    # The name is in parentheses and may contain any byte, parentheses too.
    return _read(pid, "stat").rpartition(b")")[2].split()


def worker_of(pid: int, hub: str) -> int | None:
    """The pid of the worker that a process is marked with; None for a process of another hub or user."""
    # It is ``NO_WORKER`` for a zygote, and for a process that the zygote forked and that is no worker yet.
    marked, _, worker = _line(pid, "environ", b"\0", VARIABLE.encode() + b"=").decode("ascii", "replace").partition(":")
    if marked == hub and worker.isdigit():
        return int(worker)
    soft = _line(pid, "limits", b"\n", b"Max realtime timeout").split()
    if not soft or not soft[0].isdigit():
        return None
    number, worker_pid = divmod(int(soft[0]), PIDS)
    return worker_pid if number == _hub_number(hub) else None


def _line(pid: int, file: str, end: bytes, wanted: bytes) -> bytes:
    """The rest of the line that begins with ``wanted`` in a ``/proc`` file of a process; empty if there is none."""
    lines = _read(pid, file).split(end)
    return next((line[len(wanted) :] for line in lines if line.startswith(wanted)), b"")


def _hub_number(hub: str) -> int:
    return 1 << 30 | int(hub, 16) % (1 << 30)  # large, so that no real limit equals it


def listed_children(pid: int) -> list[int] | None:
    """The child processes of a process, including those that have ended and are not reaped."""
    # None if the process has ended, or this kernel keeps no such lists.
    pids: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                pids += map(int, file.read().split())
    except OSError:
        return None
    return pids


def children(pid: int) -> list[int]:
    """Those of ``listed_children``; where the kernel does not list them, every process is looked at."""
    pids = listed_children(pid)
    if pids is None:
        every = _pids() if os.path.exists(f"/proc/{pid}") else []
        return [each for each in every if stat(each)[1:2] == [str(pid).encode()]]
    return pids


def family(*pids: int, every: bool = False) -> list[int]:
    """These processes and their descendants, ``PROCESSES_MAX`` or so of them, or else ``every`` one."""
    members = [*pids]
    for each in members:  # the list grows during the loop
        if every:
            members += children(each)
        elif len(members) < PROCESSES_MAX:
            members += listed_children(each) or ()  # a search of every process would cost too much
    return members


def memory_bytes(*pids: int) -> int:
    """The resident memory of these processes and their descendants, without files and shared memory."""
    # Pages that a worker shares with its zygote count, some tens of megabytes. A process that has ended counts as 0.
    pages = ([*map(int, _read(each, "statm").split())] or [0, 0, 0] for each in family(*pids))
    return sum(resident - shared for _, resident, shared, *_ in pages) * mmap.PAGESIZE


def private_bytes(pid: object = "self") -> int:
    """The memory that a process shares with no other; to read it takes about a millisecond."""
    lines = [line.split() for line in _read(pid, "smaps_rollup").splitlines()]
    return sum(int(line[1]) * 1024 for line in lines if line[0] in (b"Private_Dirty:", b"Private_Clean:"))


def cpu_s(*pids: int) -> float:
    """The CPU time of these processes and their descendants, also of those that have ended and were waited for."""
    return sum(sum(map(int, stat(each)[11:15])) for each in family(*pids)) / os.sysconf("SC_CLK_TCK")


def kill_tree(pid: int) -> None:
    for number in family(pid, every=True):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal.SIGKILL)


def end_all(hub: str, workers: set[int]) -> None:
    deadline_s = time.monotonic() + END_TIMEOUT_S
    empty_searches = 0
    # One empty search is not enough: a process that is about to exec shows no environment.
    while empty_searches < 2 and time.monotonic() < deadline_s:
        pids = [pid for pid in _pids() if pid != os.getpid() and _is_left(pid, hub, workers)]
        for pid in pids:
            kill_tree(pid)
        empty_searches = 0 if pids else empty_searches + 1
        time.sleep(END_POLL_S)


def _is_left(pid: int, hub: str, workers: set[int]) -> bool:
    fields = stat(pid)
    if not fields or fields[0] in (b"Z", b"X"):  # it has ended, and may not be reaped yet
        return False
    worker = worker_of(pid, hub)
    if worker == NO_WORKER and _line(pid, "comm", b"\n", b"") == ZYGOTE.encode():
        return False  # it does the same, and two that end each other would leave the rest
    return int(fields[2]) in workers or worker is not None


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def own_folder() -> str:
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def die_with_hub(hub: int) -> None:
    """Let the kernel end this process, a child of the hub's main thread, when that thread ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != hub:
        os._exit(1)  # the hub ended before the line above


def leave_terminal() -> None:
    """Make this process a group of its own without a terminal: Ctrl-C is for the program that started it."""
    # It stays in that program's session. Linux shares the CPUs among sessions first (autogroups), so that on a busy
    # machine every wake-up from one session to another waits for the time slices of other programs.
    os.setpgid(0, 0)
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # there is none
        return
    # To read it, or to write to it, could stop this process.
    fcntl.ioctl(terminal, termios.TIOCNOTTY)
    os.close(terminal)


def mute_warnings() -> None:
    """Ignore warnings until workers begin, if the interpreter was started with -W: they may not end its start."""
    if sys.warnoptions:
        warnings.filters.insert(0, _MUTE)  # type: ignore[attr-defined]  # simplefilter removes an equal one of -W


def unmute_warnings() -> None:
    if _MUTE in warnings.filters:
        warnings.filters.remove(_MUTE)  # type: ignore[attr-defined]
