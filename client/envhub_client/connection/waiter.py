"""Waiting for descriptors, by the best means of the system: epoll on Linux, poll on macOS, select on Windows."""

from __future__ import annotations

import math
import select
import sys
from collections.abc import Callable, Sequence
from io import FileIO
from typing import Protocol

READABLE = 1  # POLLIN of every system, and EPOLLIN
# Windows' select is not interrupted by Ctrl-C, which Python handles at the end of a turn.
TURN_S = 0.2


class Waiter(Protocol):
    """Waits for the descriptors that were registered."""

    def register(self, descriptor: int | FileIO, events: int, /) -> None:
        """Wait for ``READABLE`` of this descriptor, too."""

    def poll(self, timeout_s: float, /) -> Sequence[tuple[int, int]]:
        """Return the descriptors that are readable, each with its events; none after ``timeout_s`` seconds or earlier.

        Raises:
            OSError, ValueError: the waiter or a descriptor was closed.
        """

    def close(self) -> None:
        """End it; again, after an interrupt."""


if sys.platform != "win32":

    class PollWaiter:
        """Waits by ``select.poll``."""

        def __init__(self) -> None:
            poll = select.poll()
            self.register = poll.register
            self._poll: Callable[[int], list[tuple[int, int]]] | None = poll.poll

        def poll(self, timeout_s: float, /) -> Sequence[tuple[int, int]]:
            """Wait, as ``Waiter.poll``."""
            if self._poll is None:
                raise ValueError("this waiter is closed")
            return self._poll(math.ceil(timeout_s * 1000))

        def close(self) -> None:
            """Close, as ``Waiter.close``."""
            self._poll = None


class SelectWaiter:
    """Waits by ``select.select``, for at most ``TURN_S``."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def register(self, descriptor: int | FileIO, events: int, /) -> None:
        """Register, as ``Waiter.register``."""
        self._descriptors.append(descriptor if isinstance(descriptor, int) else descriptor.fileno())

    def poll(self, timeout_s: float, /) -> Sequence[tuple[int, int]]:
        """Wait, as ``Waiter.poll``."""
        if not self._descriptors:
            raise ValueError("this waiter is closed")
        readable, _, _ = select.select(self._descriptors, (), (), min(timeout_s, TURN_S))
        return [(descriptor, READABLE) for descriptor in readable]

    def close(self) -> None:
        """Close, as ``Waiter.close``."""
        self._descriptors.clear()


def new_waiter() -> Waiter:
    """A waiter for no descriptors yet."""
    waiter: Waiter
    if sys.platform == "linux":
        waiter = select.epoll()
    elif sys.platform == "win32":
        waiter = SelectWaiter()
    else:
        waiter = PollWaiter()
    return waiter
