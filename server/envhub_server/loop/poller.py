"""The descriptors that the hub's loop waits for, those of libzmq's sockets among them."""

from __future__ import annotations

import select
from collections.abc import Callable
from operator import itemgetter
from typing import Protocol

Ready = list[tuple[int, int]]  # descriptors, each with the events of epoll

_DESCRIPTOR = itemgetter(0)


class Source(Protocol):
    """The owner of descriptors that the loop waits for."""

    def on_ready(self, descriptor: int) -> None:
        """Handle a descriptor that is readable, or writable where ``want_writable`` asked for that."""


class Poller:
    """Descriptors, each with the source that handles it.

    Attributes:
        wait: returns the descriptors that are ready within this many seconds; None waits without an end.
    """

    def __init__(self) -> None:
        self._sources: dict[int, Source] = {}
        self._epoll = select.epoll()
        self.wait: Callable[[float | None], Ready] = self._epoll.poll

    def handle(self, ready: Ready) -> None:
        """Call the source of each descriptor that has one."""
        sources = self._sources
        wanted = [*map(sources.get, map(_DESCRIPTOR, ready))]
        for (descriptor, _), source in zip(ready, wanted, strict=True):
            # An earlier source of this turn may have closed it, and another may have its number by now.
            if source is not None and sources.get(descriptor) is source:
                source.on_ready(descriptor)

    def wake_on(self, descriptor: int) -> None:
        """End a wait whenever the descriptor is readable; the caller of ``wait`` handles it."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def register(self, descriptor: int, source: Source, edges: bool = False) -> None:
        """Wait until it is readable; with ``edges`` for new input only, whether or not the old input is read."""
        self._sources[descriptor] = source
        self._epoll.register(descriptor, select.EPOLLIN | (select.EPOLLET if edges else 0))

    def want_writable(self, descriptor: int, wanted: bool) -> None:
        """Begin, or cease, to wait also until the descriptor is writable."""
        if descriptor in self._sources:
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def unregister(self, descriptor: int) -> None:
        """Cease to wait for the descriptor; it stays open."""
        if self._sources.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Forget all descriptors, and free the poller's own."""
        self._sources.clear()
        self._epoll.close()
