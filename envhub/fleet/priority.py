"""Priority of a hub: Ray runs its workers behind all other processes, and a hub is no batch job."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def take_priority_of(pid: int) -> list[str]:
    """Give this thread the niceness, and this process the OOM score, of another process; children inherit them.

    Returns:
        What the kernel does not allow, in sentences for a log.
    """
    return [*_take_niceness(os.getpriority(os.PRIO_PROCESS, pid)), *_take_oom_score(Path(f"/proc/{pid}"))]


def _take_niceness(wanted: int) -> list[str]:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, wanted)
    except PermissionError:
        lowest = max(wanted, 20 - resource.getrlimit(resource.RLIMIT_NICE)[0])
        niceness = min(lowest, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
        return [
            f"the hub has niceness {niceness}, not {wanted}: start Ray with RAY_worker_niceness={wanted}, "
            f"or raise the limit `ulimit -e` to {20 - wanted}"
        ]
    return []


def _take_oom_score(process: Path) -> list[str]:
    wanted = (process / "oom_score_adj").read_text().strip()
    try:
        Path("/proc/self/oom_score_adj").write_text(wanted)
    except PermissionError:
        own = Path("/proc/self/oom_score_adj").read_text().strip()
        return [f"the hub has an oom_score_adj of {own}, not {wanted}, so that it is killed before other processes"]
    return []
