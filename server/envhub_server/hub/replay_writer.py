"""Writes replays in a thread: to read a journal and to write a file may take longer than the hub's loop may be held."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from envhub_server.catalog.replay_folder import ReplayFolder
from envhub_server.log import Logger
from envhub_server.loop.poller import Poller

log = Logger("envhub.hub")

WAITING_BYTES_MAX = 1 << 28  # of parts of journals that are still to be read; those of one session may be half of it
SWITCH_S = 0.0005  # after which the thread lets the loop go on; Python's 5 ms would be waited for at each system call
CLOSE_S = 2.0  # for what waits to be written when the hub ends


class _Wanted(NamedTuple):
    session: int
    name: str
    journal_bytes: int
    made: Callable[[], bytes]


class ReplayWriter:
    """Makes and writes one replay after the other.

    The thread logs nothing, because the hub's log belongs to its loop: what is not kept is logged by the loop.
    """

    def __init__(self, folder: ReplayFolder, poller: Poller) -> None:
        """Into this folder; it is cleared of leftovers, and the thread begins, with ``begin``.

        Raises:
            OSError: there is no descriptor left.
        """
        self._folder, self._poller = folder, poller
        self._waiting: deque[_Wanted] = deque()
        self._waiting_bytes: Counter[int] = Counter()  # by session, with the one that is being written
        self._changed = threading.Condition()
        self._closing = False
        self._not_kept: deque[tuple[str, str]] = deque()
        self._thread: threading.Thread | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        poller.register(self._bell, self)

    def begin(self) -> None:
        """Begin the thread, which first removes what hubs that were killed have left in the folder."""
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._run, name="envhub-replays", daemon=True)
        self._thread.start()

    def write(self, session: int, name: str, journal_bytes: int, made: Callable[[], bytes]) -> None:
        """Write the file of this name soon, or log why not.

        Args:
            session: the number of the session that asks for it.
            name: of the replay.
            journal_bytes: the size of the part of the journal that is kept in memory until then.
            made: called in the thread; returns what the file is to hold, or raises.
        """
        with self._changed:
            if why := self._refusal(session, journal_bytes):
                self._not_kept.append((name, why))
            else:
                self._waiting.append(_Wanted(session, name, journal_bytes, made))
                self._waiting_bytes[session] += journal_bytes
                self._changed.notify()
        if why:
            self._log()

    def _refusal(self, session: int, journal_bytes: int) -> str:
        """The reason why a replay cannot wait to be written; empty if it can. One with nothing before it always can."""
        own, everyone = self._waiting_bytes[session], self._waiting_bytes.total()
        if own and own + journal_bytes > WAITING_BYTES_MAX // 2:
            return f"those of its session that wait to be written hold up to {WAITING_BYTES_MAX // 2} bytes of journals"
        if everyone and everyone + journal_bytes > WAITING_BYTES_MAX:
            return f"those that wait to be written hold up to {WAITING_BYTES_MAX} bytes of journals"
        return ""

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # then the first replay tells why, too
            self._folder.remove_leftovers()
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                wanted = self._waiting.popleft()
            why = self._written(wanted)
            with self._changed:
                self._waiting_bytes[wanted.session] -= wanted.journal_bytes
                self._waiting_bytes = +self._waiting_bytes
                if why:
                    self._not_kept.append((wanted.name, why))
                    os.eventfd_write(self._bell, 1)
            del wanted  # it holds a journal, and the next one may never come

    def _written(self, wanted: _Wanted) -> str:
        """Write the file; returns why it could not be."""
        try:
            self._folder.keep(wanted.name, wanted.made())
        except Exception as error:  # whatever foreign code has written into its journal, the thread goes on
            if isinstance(error, OSError) and error.strerror:
                return error.strerror  # the whole text has the file's name, which is another one each time
            return str(error) if isinstance(error, (OSError, ValueError, TypeError)) else repr(error)
        return ""

    def on_ready(self, descriptor: int) -> None:
        """Log what was not kept."""
        os.eventfd_read(self._bell)
        self._log()

    def _log(self) -> None:
        while self._not_kept:
            name, why = self._not_kept.popleft()
            log.warning("replay_not_kept", once_per=("why",), replay=name, why=why)

    def close(self) -> None:
        """Wait for a moment until all is written, and log what is not."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        with self._changed:
            self._not_kept.extend((wanted.name, "the hub ends") for wanted in self._waiting)
            self._waiting.clear()
        self._log()
        self._poller.unregister(self._bell)
        if self._thread is None or not self._thread.is_alive():
            os.close(self._bell)
