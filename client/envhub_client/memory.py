"""How much memory processes take: PSS, where a page that several of them share counts once in all."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping

import psutil

MEGABYTE = 1e6

BytesByPid = Mapping[int, int]


def memory_of_all() -> BytesByPid:
    """Bytes of this process and of each that it started and that still runs, by pid."""
    gc.collect()
    found = {}
    for process in (this := psutil.Process(), *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found[process.pid] = int(process.memory_full_info().pss)
    return found


def added_mb(before: BytesByPid, after: BytesByPid, hub_pid: int | None = None) -> float:
    """Megabytes that all processes together hold more than before; 0 where freed memory was enough.

    All, because what a forked process shares with this one is taken from this one's share.

    Args:
        before: by pid, before something was added.
        after: by pid, since.
        hub_pid: of a hub that it is stepped through, which counts with its zygote even if both were there before.
    """
    counted = {hub_pid, *zygotes(hub_pid)} if hub_pid else set()
    held = sum(size for pid, size in before.items() if pid not in counted)
    return max(0.0, (sum(after.values()) - held) / MEGABYTE)


def zygotes(hub_pid: int) -> list[int]:
    """The pid of what a hub forks its workers from: the first that it started; none where it has no workers yet."""
    return [child.pid for child in sorted(psutil.Process(hub_pid).children(), key=psutil.Process.create_time)[:1]]
