"""What the hub's loop waits for: descriptors, those of libzmq's sockets among them."""

from __future__ import annotations

import select
from collections.abc import Callable
from operator import itemgetter

Ready = list[tuple[int, int]]  # descriptors, each with what epoll says of it

_DESCRIPTOR = itemgetter(0)


class Poller:
    """Descriptors, and whom to call when there is something to read.

    Attributes:
        wait: returns which descriptors are ready, now or within so many seconds; None is without an end.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[], object]] = {}
        self._epoll = select.epoll()
        self.wait: Callable[[float | None], Ready] = self._epoll.poll

    def handle(self, ready: Ready) -> None:
        """Call the handlers of these descriptors, of those that have one."""
        found = [*map(self._handlers.get, map(_DESCRIPTOR, ready))]
        for (descriptor, _), handler in zip(ready, found, strict=True):
            # An earlier handler of this turn may have ended it, and its number may be another's by now.
            if handler is not None and self._handlers.get(descriptor) is handler:
                handler()

    def wake_on(self, descriptor: int) -> None:
        """End a wait whenever the descriptor is readable; whoever waits deals with it."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def register(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call ``handler`` whenever the descriptor is readable."""
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

    def register_edges(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call ``handler`` whenever something more can be read, whether or not that is ever done."""
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def want_writable(self, descriptor: int, wanted: bool) -> None:
        """Call the descriptor's handler when it is writable, too."""
        if descriptor in self._handlers:
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def unregister(self, descriptor: int) -> None:
        """Stop calling; the descriptor is still open."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Watch nothing any more."""
        self._handlers.clear()
        self._epoll.close()
