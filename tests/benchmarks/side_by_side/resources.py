"""Use of processes: CPU time, and memory as PSS, where a page that several of them share counts once in all."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

MEGABYTE = 1e6


@dataclass(frozen=True)
class Memory:
    """Use of this process and all that it started, at one time."""

    own: int  # bytes of this process, shared or not (RSS)
    shares: Mapping[int, int]  # by pid, bytes of each process, a shared page in equal parts (PSS)


def memory(known: Memory | None = None) -> Memory:
    """Measure this process now; of other processes take the known values, since asking hundreds takes seconds."""
    this = psutil.Process()
    shares = {} if known is None else dict(known.shares)
    for process in (this, *(this.children(recursive=True) if known is None else ())):
        with contextlib.suppress(psutil.Error):  # it has just ended
            shares[process.pid] = int(process.memory_full_info().pss)
    return Memory(this.memory_info().rss, shares)


def added_mb(before: Memory, after: Memory, hub_pid: int | None = None) -> float:
    """Megabytes that are held more than before; 0 where freed memory was enough.

    With new processes, all of them together and with those that were there: what a forked process shares with this one
    is taken from this one's share. Without, this one's own, as writing to what it shares only seems to take more. A hub
    that it is stepped through counts with its zygote even if both were there before.
    """
    if not after.shares.keys() - before.shares.keys():
        return max(0.0, (after.own - before.own) / MEGABYTE)
    counted = {hub_pid, *zygotes(hub_pid)} if hub_pid else set()
    held = sum(size for pid, size in before.shares.items() if pid not in counted)
    return max(0.0, (sum(after.shares.values()) - held) / MEGABYTE)


def zygotes(hub_pid: int) -> list[int]:
    """The pid of what a hub forks its workers from: the first that it started; none where it has no workers yet."""
    return [child.pid for child in sorted(psutil.Process(hub_pid).children(), key=psutil.Process.create_time)[:1]]


def cpu_seconds_of_others() -> float:
    """CPU time of all processes that this one started and that still run."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            total += times.user + times.system
    return total


def physical_cpus() -> int:
    """Number of cores this machine has, where the hardware threads of one core count once."""
    return psutil.cpu_count(logical=False) or 1
