"""Signals by a descriptor that the hub's loop waits for: their handlers run in the loop and hold no lock."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

from envhub_server.loop.poller import Poller

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ASKING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)  # which would end a process that does not handle them


class Signals:
    """Reads the numbers of signals from a socket, and calls their handlers."""

    def __init__(self, ours: socket.socket, on_named: Callable[[str], None], on_child: Callable[[], None]) -> None:
        self.stopped = False  # whether a signal to stop the process has come
        self._ours = ours
        self._on_named = on_named
        self._on_child = on_child

    def on_ready(self, descriptor: int) -> None:
        """Handle the signals that have come."""
        for number in self._ours.recv(64):
            if number == signal.SIGCHLD:
                self._on_child()
            elif number in (*STOPPING, *ASKING):
                self.stopped = self.stopped or number in STOPPING
                self._on_named(signal.Signals(number).name)


@contextlib.contextmanager
def handled(
    poller: Poller, on_named: Callable[[str], None], on_child: Callable[[], None], is_served: bool
) -> Iterator[None]:
    """Within the context, call ``on_named`` with a signal's name, and ``on_child`` when a child process has ended.

    Signals to a hub that is not served, but belongs to a program, mean the program: only ``on_child`` is called.

    A process that got a signal to stop is about to end by itself: after the context it ignores these signals.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    source = Signals(ours, on_named, on_child)
    numbers = (*STOPPING, *ASKING, signal.SIGCHLD) if is_served else (signal.SIGCHLD,)
    with ours, theirs:
        poller.register(ours.fileno(), source)
        # The descriptor before the handlers, and after them: a signal that only reached a handler would be lost.
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        before = [signal.signal(number, lambda *_: None) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, signal.SIG_IGN if source.stopped and number in STOPPING else handler)
            signal.set_wakeup_fd(wakeup)
            poller.unregister(ours.fileno())
