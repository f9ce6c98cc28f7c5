"""One thread at a time: the lock of a connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from envhub import errors

_Lock: Any = type(threading.RLock())


class ConnectionLock(_Lock):  # type: ignore[misc]
    """A lock, held by the thread that uses a connection, which may nest its uses; another thread is refused.

    Attributes:
        closed: whether the connection is closed, or was begun to be: an interrupt may have left some of it open.
    """

    def __init__(self, address: str) -> None:
        super().__init__()  # for locks that are written in Python, as gevent's are
        self.closed = False
        self._address = address
        self._pid = os.getpid()
        self._kept_alive = threading.Lock()  # held while the keep-alive thread is using the connection, for an instant

    def check(self) -> None:
        """Check that there is a connection to use.

        Raises:
            LocalProtocolError: the connection is closed.
            Forked: it belongs to the process that this one was forked from.
        """
        if self.closed:
            raise errors.LocalProtocolError(f"this connection to {errors.hub_at(self._address)} is closed")
        if os.getpid() != self._pid:
            raise errors.Forked("this connection was made before a fork; connect again in the child")

    def __enter__(self) -> None:
        if self.closed or os.getpid() != self._pid:
            self.check()
        if not self.acquire(blocking=False):
            self.take()

    def take(self) -> None:
        """Use the connection until ``release``, even if it is closed.

        Raises:
            ConnectionInUse: another thread uses it.
        """
        if not self.acquire(blocking=False):
            with self._kept_alive:
                if not self.acquire(blocking=False):
                    text = "another thread is using this connection; give each thread a vector env of its own"
                    raise errors.ConnectionInUse(text)

    def while_idle(self, work: Callable[[], None]) -> None:
        """Call ``work``, unless a thread is using the connection; a thread that is about to use it waits."""
        with self._kept_alive:
            if self.acquire(blocking=False):
                try:
                    work()
                finally:
                    self.release()
