"""What the hub's loop waits for: descriptors, those of libzmq's sockets among them."""

from __future__ import annotations

import select
from collections.abc import Callable
from operator import itemgetter
from typing import Protocol

Ready = list[tuple[int, int]]  # descriptors, each with what epoll says of it

_DESCRIPTOR = itemgetter(0)


class Source(Protocol):
    """The owner of descriptors that the loop waits for."""

    def on_ready(self, descriptor: int) -> None:
        """Something can be read from this descriptor, or be written if that was wanted."""


class Poller:
    """Descriptors, each with the source that deals with it.

    Attributes:
        wait: returns which descriptors are ready, now or within so many seconds; None is without an end.
    """

    def __init__(self) -> None:
        self._sources: dict[int, Source] = {}
        self._epoll = select.epoll()
        self.wait: Callable[[float | None], Ready] = self._epoll.poll

    def handle(self, ready: Ready) -> None:
        """Have the sources of these descriptors deal with them, of those that have one."""
        sources = self._sources
        found = [*map(sources.get, map(_DESCRIPTOR, ready))]
        for (descriptor, _), source in zip(ready, found, strict=True):
            # An earlier source of this turn may have closed it, and its number may be another's by now.
            if source is not None and sources.get(descriptor) is source:
                source.on_ready(descriptor)

    def wake_on(self, descriptor: int) -> None:
        """End a wait whenever the descriptor is readable; the caller of ``wait`` deals with it."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def register(self, descriptor: int, source: Source, edges: bool = False) -> None:
        """Wait for something to read; with ``edges`` only for more than there was, whether or not that is ever read."""
        self._sources[descriptor] = source
        self._epoll.register(descriptor, select.EPOLLIN | (select.EPOLLET if edges else 0))

    def want_writable(self, descriptor: int, wanted: bool) -> None:
        """Wait for the descriptor to be writable, too, or no more."""
        if descriptor in self._sources:
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def unregister(self, descriptor: int) -> None:
        """Wait for it no more; the descriptor is still open."""
        if self._sources.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Wait for nothing any more."""
        self._sources.clear()
        self._epoll.close()
