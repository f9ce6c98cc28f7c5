"""The descriptors that wake a worker, and those by which it wakes a driver.

The hub's bell is a pipe: no worker can make the hub wait at its end of it. Epoll watches the client's bell by edges:
each ring wakes the worker once, and the worker never reads it, which saves a read for every step.
"""

from __future__ import annotations

import contextlib
import os
import select
import time

from envhub.arena.memory import DRIVER_CLIENT, DRIVER_HUB
from envhub.arena.spin import RING, Spinner
from envhub_server.ipc.channel import moved_up
from envhub_server.ipc.control import ArenaDescriptors


class WorkerPoller:
    """Waits for descriptors, by one of its own that env code does not close by accident.

    ``wait``: returns the descriptors that are ready, each with its events, once there are any.
    """

    def __init__(self) -> None:
        with contextlib.closing(select.epoll()) as made:
            self._epoll = select.epoll.fromfd(moved_up(os.dup(made.fileno())))
        self.wait = self._epoll.poll

    def register(self, descriptor: int, edges: bool = False) -> None:
        self._epoll.register(descriptor, select.EPOLLIN | (select.EPOLLET if edges else 0))

    def unregister(self, descriptor: int) -> None:
        """Cease to wait for the descriptor; raises ``OSError``."""
        self._epoll.unregister(descriptor)

    def close(self) -> None:
        self._epoll.close()


RINGS_BYTES = 1 << 16  # more than a pipe can hold


class Bells:
    """The bells of the arena."""

    def __init__(self, poller: WorkerPoller) -> None:
        self._poller = poller
        self.waking: tuple[int, ...] = ()  # the hub's and the client's, which wake this worker
        self.hub_bell = -1  # the hub's; -1 before there is an arena
        self.serving = False  # whether the rows in the arena are this worker's; only then the bells are watched
        self.spinner = Spinner(0, time.perf_counter_ns)  # spins before the worker parks; never before the worker serves
        self._of_drivers: dict[int, int] = {}

    def attach(self, descriptors: ArenaDescriptors) -> None:
        self.hub_bell = descriptors.hub_bell
        self.waking = descriptors.hub_bell, descriptors.client_bell
        self._of_drivers = {DRIVER_HUB: descriptors.hub_done_bell, DRIVER_CLIENT: descriptors.client_done_bell}

    def watch(self, spin_us: int) -> None:
        """Begin to be woken by the bells, and to spin for this long before the worker parks."""
        hub_bell, client_bell = self.waking
        self._poller.register(hub_bell)
        self._poller.register(client_bell, edges=True)
        self.spinner, self.serving = Spinner(spin_us, time.perf_counter_ns), True

    def unwatch(self) -> None:
        for bell in self.waking:
            with contextlib.suppress(OSError):  # they are not registered before the worker serves
                self._poller.unregister(bell)
        self.spinner, self.serving = Spinner(0, time.perf_counter_ns), False

    def silence(self) -> None:
        try:
            os.read(self.hub_bell, RINGS_BYTES)
        except BlockingIOError:
            pass  # a process that an env forked has read them

    def ring(self, driver: int) -> None:
        try:
            os.write(self._of_drivers.get(driver, self._of_drivers[DRIVER_HUB]), RING)
        except BlockingIOError:
            pass  # its owner has not read it

    def close(self) -> None:
        for bell in (*self.waking, *self._of_drivers.values()):
            os.close(bell)
