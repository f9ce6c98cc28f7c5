"""Signals as one more descriptor that the hub's loop watches: their handlers run in the loop and hold no lock."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

from envhub_server.loop.poller import Poller

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def watched(poller: Poller, on_stop: Callable[[str], None], on_child: Callable[[], None]) -> Iterator[None]:
    """Within the context, call ``on_stop`` with a signal's name, and ``on_child`` when a child process has ended.

    A process that was told to stop is about to end by itself: after the context it heeds no further signal to stop.
    """
    told: list[str] = []
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)

    def on_wakeup() -> None:
        for number in ours.recv(64):
            if number == signal.SIGCHLD:
                on_child()
            elif number in STOPPING:
                told.append(signal.Signals(number).name)
                on_stop(told[-1])

    numbers = (*STOPPING, signal.SIGCHLD)
    with ours, theirs:
        poller.register(ours.fileno(), on_wakeup)
        # The descriptor before the handlers, and after them: a signal that only reached a handler would be lost.
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        before = [signal.signal(number, lambda *_: None) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, signal.SIG_IGN if told and number in STOPPING else handler)
            signal.set_wakeup_fd(wakeup)
            poller.unregister(ours.fileno())
