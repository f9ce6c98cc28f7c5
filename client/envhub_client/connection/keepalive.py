"""A connection's two users: the program, one thread at a time, and a thread that keeps it alive meanwhile."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from envhub import errors

CHECK_S = 0.5


class KeepAlive:
    """A thread that keeps connections alive while their program is busy elsewhere, as in a long update of its policy.

    libzmq replaces a connection that ends; but only a message tells the hub which session the new one belongs to, and
    until then the session's lease runs. The thread sends that message, and warns of a hub that is out of reach.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # which a thread may hold when the garbage collector closes a connection in it
        self._kept: dict[int, weakref.ref[Any]] = {}  # connections, each with its ``keep_alive``
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def add(self, kept: object) -> None:
        """Keep this alive, until it is garbage or ``drop`` is called; the thread refers to it weakly."""
        with self._lock:
            self._kept[id(kept)] = weakref.ref(kept)
            begun = self._thread is not None and self._thread.is_alive()  # not if an interrupt came before its start
            if not begun and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="envhub-keep-alive", daemon=True)
                self._thread.start()

    def drop(self, kept: object) -> None:
        with self._lock:
            self._kept.pop(id(kept), None)

    def stop(self) -> None:
        """End the thread, before the interpreter ends it in the middle of something."""
        self._stopped.set()
        if (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(CHECK_S):
            with self._lock:
                due = [kept for kept in [kept() for kept in list(self._kept.values())] if kept is not None]
                if not due:
                    self._kept.clear()
                    self._thread = None
                    return
            while due:  # each reference is given up at once: the program may drop a connection meanwhile
                due.pop().keep_alive()


keep_alive = KeepAlive()


def _forked() -> None:
    global keep_alive
    keep_alive = KeepAlive()  # a child has neither the thread nor the connections


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
atexit.register(lambda: keep_alive.stop())


_Lock: Any = type(threading.RLock())
NOT_BLOCKING = (False,)  # the argument of ``acquire``


class ConnectionLock(_Lock):  # type: ignore[misc]
    """A lock, held by the thread that uses a connection, which may nest its uses; another thread is refused."""

    def __init__(self, address: str) -> None:
        super().__init__()  # for locks that are written in Python, as gevent's are
        self.closed = False  # or begun to be closed: an interrupt may have left some of it open
        self._address = address
        self._pid = os.getpid()
        self._kept_alive = threading.Lock()  # held while the keep-alive thread is using the connection, for an instant

    def check(self) -> None:
        if self.closed:
            raise errors.LocalProtocolError(f"this connection to {errors.hub_at(self._address)} is closed")
        if os.getpid() != self._pid:
            raise errors.Forked("this connection was made before a fork; connect again in the child")

    def __enter__(self) -> None:
        if self.closed or os.getpid() != self._pid:
            self.check()
        taken: list[bool] = []
        try:
            # A signal handler runs once a call has returned: one call takes the lock and notes it, so that no interrupt
            # leaves the lock taken, which would keep the keep-alive thread out for good.
            taken.extend(map(self.acquire, NOT_BLOCKING))
        except BaseException:
            if taken and taken[0]:
                self.release()
            raise
        if not taken[0]:
            self.take()

    def take(self) -> None:
        """Use the connection until ``release``, even if it is closed."""
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
