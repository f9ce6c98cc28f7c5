"""Rings of eventfds that other processes hold, too.

Such a process can fill the eventfd and clear its O_NONBLOCK, and nothing can be written to an eventfd then without
waiting: the flag belongs to all holders, and between a check and the write it may change. So a thread writes.
"""

from __future__ import annotations

import contextlib
import os
import threading

from envhub.arena.spin import RING


class Ringer:
    """Rings one process's bells; at most one thread waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = False
        self._again = -1  # a copy of the bell to ring next; -1 for none

    def ring(self, bell: int) -> None:
        """Ring this eventfd soon; rings that its holder keeps waiting become one."""
        with self._lock:
            copy = os.dup(bell)
            if self._again >= 0:
                os.close(self._again)
            self._again = copy
            if self._runs:
                return
            self._runs = True
        threading.Thread(target=self._run, name="envhub-ringer", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                bell, self._again = self._again, -1
                if bell < 0:
                    self._runs = False
                    return
            with contextlib.suppress(OSError):  # full, and not to be waited for
                os.write(bell, RING)
            os.close(bell)
