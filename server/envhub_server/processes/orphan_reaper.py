"""The orphans of a hub: what envs started comes to the hub, a subreaper, once its parent has ended.

Those that have ended are reaped, as init would do it; those whose worker has ended are ended, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection

from envhub_server.ipc import process_marks

REMEMBERED_S = 10.0  # a worker that has ended: its children's children come to the hub only as these end
CLOSE_TIMEOUT_S = 1.0
CLOSE_POLL_S = 0.002


class OrphanReaper:
    """The children of this process that it did not start."""

    def __init__(self, hub: str) -> None:
        """Of what is marked with this hub; children that stand now are somebody else's, and nobody's orphans."""
        self._hub = hub
        self._foreign = frozenset(process_marks.children(os.getpid()))
        self._adopted: dict[int, int] = {}  # by pid of an orphan, its worker's; 0 where nobody knows
        self._ended: dict[int, float] = {}  # by pid of a worker, until when it is remembered

    def worker_ended(self, pid: int) -> None:
        """What this worker left behind is to be ended by the next ``sweep``."""
        self._ended[pid] = time.monotonic() + REMEMBERED_S

    def sweep(self, known: Collection[int], workers: Collection[int], births: bool) -> None:
        """End or reap what there is to be ended or reaped.

        Args:
            known: children that somebody else reaps.
            workers: those that live.
            births: whether there may be workers whose number the hub does not know yet. Then nothing is reaped, and
                only what belonged to workers that ended lately is ended.
        """
        now_s = time.monotonic()
        self._ended = {pid: until for pid, until in self._ended.items() if until > now_s and pid not in workers}
        before, self._adopted = self._adopted, {}
        for pid in process_marks.children(os.getpid()):
            if pid in known or (not births and _reaped(pid)):  # what was just born is a worker, and wanted
                continue
            worker = (
                before[pid] if pid in before else process_marks.worker_of(pid, self._hub) or process_marks.NO_WORKER
            )
            self._adopted[pid] = worker
            # Of a worker that was just born there may be orphans before the hub knows its number.
            if worker in self._ended or not (births or worker in workers or worker in (process_marks.NO_WORKER, pid)):
                process_marks.end(pid)

    def end_all(self) -> None:
        """End everything below this process but what was there before, and wait until it has ended."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while time.monotonic() < deadline_s:
            found = [pid for pid in process_marks.children(os.getpid()) if pid not in self._foreign]
            for pid in found:
                process_marks.end(pid)
                _reaped(pid)
            if not found:
                return
            time.sleep(CLOSE_POLL_S)


def _reaped(pid: int) -> bool:
    """Whether a child has ended; if so, it is gone now."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    return True
