"""A thread for what the hub's loop does not wait for: it compresses large observations, or writes replays."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from envhub_server.loop import Poller


class BackgroundThread:
    """Does one piece of work after the other, and reports each to the loop.

    Attributes:
        waiting: what is to be done, and what is called in the loop then.
    """

    def __init__(self, poller: Poller, name: str) -> None:
        """The thread of this name begins with the first piece of work.

        Raises:
            OSError: there is no descriptor left.
        """
        self._poller, self._name = poller, name
        self.waiting: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
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
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        with self._changed:
            self.waiting.append((work, done))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self.waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                work, done = self.waiting.popleft()
            work()
            with self._changed:
                self._done.append(done)
                if not self._closing:
                    os.eventfd_write(self._bell, 1)
            del work, done  # they hold observations or traces, and the next ones may never come

    def on_ready(self, descriptor: int) -> None:
        """Report what is done."""
        os.eventfd_read(self._bell)
        self._report()

    def _report(self) -> None:
        while self._done:
            self._done.popleft()()

    def finish(self, wait_s: float) -> None:
        """Wait so long for all work, report what is done, and close."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(wait_s)
        self._report()
        self.close()

    def close(self) -> None:
        """Begin nothing more; nothing is reported any more."""
        with self._changed:
            self._closing = True
            self.waiting.clear()
            self._changed.notify()
        self._poller.unregister(self._bell)
        os.close(self._bell)
