"""A thread that keeps connections alive while their program is busy elsewhere, as in a long update of its policy.

libzmq replaces a connection that ends; but only a message tells the hub which session the new one belongs to, and until
then the session's lease runs. The thread sends that message, and warns of a hub that is out of reach.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

TEND_S = 0.5


class KeptAlive(Protocol):
    """A connection, as the thread sees it."""

    def keep_alive(self) -> None:
        """Do what is due, unless another thread is using it."""


class KeepAlive:
    """The thread, which runs as long as there is a connection."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # which a thread may hold when the garbage collector closes a connection in it
        self._kept: dict[int, weakref.ref[KeptAlive]] = {}
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def add(self, kept: KeptAlive) -> None:
        """Keep this alive, until it is garbage or ``drop`` is called; the thread refers to it weakly."""
        with self._lock:
            self._kept[id(kept)] = weakref.ref(kept)
            begun = self._thread is not None and self._thread.is_alive()  # not if an interrupt came before its start
            if not begun and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="envhub-keep-alive", daemon=True)
                self._thread.start()

    def drop(self, kept: KeptAlive) -> None:
        """Keep this alive no more."""
        with self._lock:
            self._kept.pop(id(kept), None)

    def stop(self) -> None:
        """End the thread, before the interpreter ends it in the middle of something."""
        self._stopped.set()
        if (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(TEND_S):
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
