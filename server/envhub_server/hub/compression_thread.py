"""Compresses large observations in a thread: the libraries let other threads run meanwhile, such as the hub's loop."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from envhub_server.loop.poller import Poller


class CompressionThread:
    """Does one piece of work after the other, and reports each to the loop."""

    def __init__(self, poller: Poller) -> None:
        """The thread begins with the first piece of work.

        Raises:
            OSError: there is no descriptor left.
        """
        self._poller = poller
        self._waiting: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._done: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        poller.register(self._bell, self)

    def do(self, work: Callable[[], None], done: Callable[[], None]) -> None:
        """Do the work, which raises nothing, in the thread; then ``done`` is called in the loop.

        Raises:
            RuntimeError: there is no thread left.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="envhub-compression", daemon=True)
            thread.start()
            self._thread = thread
        with self._changed:
            self._waiting.append((work, done))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                work, done = self._waiting.popleft()
            work()
            with self._changed:
                self._done.append(done)
                if not self._closing:
                    os.eventfd_write(self._bell, 1)
            del work, done  # they hold observations, and the next ones may never come

    def on_ready(self, descriptor: int) -> None:
        """Report what is done."""
        os.eventfd_read(self._bell)
        while self._done:
            self._done.popleft()()

    def close(self) -> None:
        """Begin nothing more; nothing is reported any more."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify()
        self._poller.unregister(self._bell)
        os.close(self._bell)
