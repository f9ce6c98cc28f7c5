"""The bells of a worker: the descriptors that wake it, and the descriptors by which it wakes a driver.

The hub's bell is a pipe: no worker can make the hub wait at its end of it. Epoll watches the client's bell by edges:
each ring wakes the worker once, and the worker never reads it, which saves a read for every step.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import Sequence

from envhub.arena.memory import DRIVER_CLIENT, DRIVER_HUB
from envhub.arena.spin import RING, Spinner

RINGS_BYTES = 1 << 16  # more than a pipe can hold


class Bells:
    """The bells of the last mapped arena.

    Attributes:
        waking: the hub's and the client's, which wake this worker.
        serving: whether the rows in the arena are this worker's; only then the bells are watched.
        spinner: spins before the worker parks; never before the worker serves.
    """

    def __init__(self, poller: select.epoll) -> None:
        self._poller = poller
        self.waking: list[int] = []
        self.serving = False
        self.spinner = Spinner(0, time.perf_counter_ns)
        self._of_drivers: dict[int, int] = {}

    def replace(self, bells: Sequence[int]) -> None:
        """Use the bells of another arena: two that wake this worker, then two that wake the hub and the client."""
        self.unwatch()
        self.close()
        self.waking, self._of_drivers = list(bells[:2]), dict(zip((DRIVER_HUB, DRIVER_CLIENT), bells[2:]))

    def watch(self, spin_us: int) -> None:
        """Begin to be woken by the bells, and to spin for this long before the worker parks."""
        hubs, clients = self.waking
        self._poller.register(hubs, select.EPOLLIN)
        self._poller.register(clients, select.EPOLLIN | select.EPOLLET)
        self.spinner, self.serving = Spinner(spin_us, time.perf_counter_ns), True

    def unwatch(self) -> None:
        """Undo ``watch``."""
        for bell in self.waking:
            with contextlib.suppress(OSError):  # between two arenas they are not registered
                self._poller.unregister(bell)
        self.spinner, self.serving = Spinner(0, time.perf_counter_ns), False

    def silence(self) -> None:
        """Read the rings from the hub's bell, a pipe, which would otherwise fill."""
        try:
            os.read(self.waking[0], RINGS_BYTES)
        except BlockingIOError:
            pass  # a process that an env forked has read them

    def ring(self, driver: int) -> None:
        """Wake this driver; an unknown driver means the hub."""
        try:
            os.write(self._of_drivers.get(driver, self._of_drivers[DRIVER_HUB]), RING)
        except BlockingIOError:
            pass  # its owner has not read it

    def close(self) -> None:
        """Free the descriptors."""
        for bell in (*self.waking, *self._of_drivers.values()):
            os.close(bell)
