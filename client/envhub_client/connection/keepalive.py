"""A thread that looks after connections while their program is busy elsewhere, as in a long update of its policy.

libzmq keeps a connection up by itself, and makes it anew where it ends; but only a message tells the hub whose the new
one is, and until then the session's lease runs. The thread sends that message, and warns of a hub that is out of reach.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

TEND_S = 0.5


class Kept(Protocol):
    """What can be kept."""

    def keep(self) -> None:
        """Do what is due, unless somebody is using it just now."""


class Keeper:
    """The thread, which lives as long as there is something to keep."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def add(self, kept: Kept) -> None:
        """Keep this, until it is gone or ``drop`` is called."""
        with self._lock:
            self._kept.add(kept)
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="envhub-keeper", daemon=True)
                self._thread.start()

    def drop(self, kept: Kept) -> None:
        """Keep this no more."""
        with self._lock:
            self._kept.discard(kept)

    def stop(self) -> None:
        """End the thread, before the interpreter ends it in the middle of something."""
        self._stopped.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(TEND_S):
            with self._lock:
                found = list(self._kept)
                if not found:
                    self._thread = None
                    return
            while found:  # nothing is held that the program may let go of meanwhile
                found.pop().keep()


keeper = Keeper()


def _forked() -> None:
    global keeper
    keeper = Keeper()  # a child has neither the thread nor the connections


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
atexit.register(lambda: keeper.stop())
