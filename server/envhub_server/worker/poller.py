"""The descriptors that wake a worker."""

from __future__ import annotations

import contextlib
import os
import select

from envhub_server.ipc.channel import moved_up


class WorkerPoller:
    """Waits for descriptors, by one of its own that env code does not close by accident.

    Attributes:
        wait: returns the descriptors that are ready, each with its events, once there are any.
    """

    def __init__(self) -> None:
        with contextlib.closing(select.epoll()) as made:
            self._epoll = select.epoll.fromfd(moved_up(os.dup(made.fileno())))
        self.wait = self._epoll.poll

    def register(self, descriptor: int, edges: bool = False) -> None:
        """Wait until it is readable; with ``edges`` for new input only, whether or not the old input is read."""
        self._epoll.register(descriptor, select.EPOLLIN | (select.EPOLLET if edges else 0))

    def unregister(self, descriptor: int) -> None:
        """Cease to wait for the descriptor.

        Raises:
            OSError: it is not registered.
        """
        self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Free the poller's own descriptor."""
        self._epoll.close()
