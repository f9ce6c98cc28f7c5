"""Orphans: processes that envs started, and that the hub, a subreaper, adopted when their parent ended.

The hub reaps those that have exited, as init would, and ends those whose worker has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from envhub_server.ipc import process_marks
from envhub_server.ipc.process_marks import NO_WORKER, listed_children

REMEMBERED_S = 10.0  # for an ended worker: its grandchildren become the hub's children only when their parents end
CLOSE_TIMEOUT_S = 1.0
CLOSE_POLL_S = 0.002


class OrphanReaper:
    """Finds, ends and reaps the children of this process that it did not start."""

    def __init__(self, hub: str) -> None:
        """Reap orphans with this hub's mark; the children that exist now are no orphans and are left alone."""
        self._hub = hub
        self._foreign = frozenset(process_marks.children(os.getpid()))
        self._spared: set[int] = set()
        self._adopted: dict[int, int] = {}  # by pid of an orphan, the pid of its worker, or NO_WORKER
        self._ended: dict[int, float] = {}  # by pid of an ended worker, until when it is remembered

    def spare(self, pid: int) -> None:
        """Leave this child to its owner, which reaps it."""
        self._spared.add(pid)

    def reaped(self, pid: int) -> None:
        """Note that its owner has reaped such a child: another may have its number by now."""
        self._spared.discard(pid)

    def worker_ended(self, pid: int) -> None:
        """Have the next ``sweep`` end the orphans of this worker."""
        self._ended[pid] = time.monotonic() + REMEMBERED_S

    def sweep(self, others: Collection[int], workers: Collection[int], births: bool) -> None:
        """Reap orphans that have exited, and end orphans whose worker has ended.

        Args:
            others: pids of children that are reaped elsewhere.
            workers: pids of the workers that live.
            births: True if there may be workers whose pid the hub does not know yet. Then nothing is reaped, and only
                orphans of workers that ended lately are ended.
        """
        now_s = time.monotonic()
        self._ended = {pid: until for pid, until in self._ended.items() if until > now_s and pid not in workers}
        before, self._adopted = self._adopted, {}
        for pid in process_marks.children(os.getpid()):
            if pid in others or pid in self._spared:
                continue
            if not births and _reaped(pid):  # a new worker must not be reaped here
                continue
            worker = before[pid] if pid in before else process_marks.worker_of(pid, self._hub) or NO_WORKER
            self._adopted[pid] = worker
            # A new worker may have orphans before the hub knows its pid.
            if worker in self._ended or not (births or worker in workers or worker in (NO_WORKER, pid)):
                process_marks.kill_tree(pid)

    def by_worker(self, others: Collection[int]) -> Mapping[int, Sequence[int]]:
        """The orphans by the pid of the worker that started them, as far as the kernel lists children.

        Args:
            others: pids of children that are not orphans.
        """
        orphans: dict[int, list[int]] = {}
        for pid in process_marks.listed_children(os.getpid()) or ():
            if pid in others:
                continue
            worker = self._adopted.get(pid) or process_marks.worker_of(pid, self._hub) or NO_WORKER
            if worker not in (NO_WORKER, pid):  # any other pid is about to be a worker, or to execute a program
                self._adopted[pid] = worker
                orphans.setdefault(worker, []).append(pid)
        return orphans

    def end_all(self) -> None:
        """End all descendants of this process but the children from before, and wait until they have ended."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while time.monotonic() < deadline_s:
            orphans = [pid for pid in process_marks.children(os.getpid()) if pid not in self._foreign | self._spared]
            for pid in orphans:
                process_marks.kill_tree(pid)
                _reaped(pid)
            if not orphans:
                return
            time.sleep(CLOSE_POLL_S)


def _reaped(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    return True


PROCESSES_MAX = 1000  # of one worker that are looked at


def memory_bytes(*pids: int) -> int:
    """The resident memory of these processes and their descendants, without files and shared memory such as the arena.

    Pages that a worker shares with its zygote count, some tens of megabytes. A process that has ended counts as 0.
    """
    total, family = 0, [*pids]
    for each in family:  # the list grows during the loop
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += _resident_bytes(each)
            if len(family) < PROCESSES_MAX:
                family += listed_children(each) or ()  # a search of every process would cost too much
    return total


def _resident_bytes(pid: int) -> int:
    _, resident, shared = Path(f"/proc/{pid}/statm").read_bytes().split()[:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE
