"""What the hub's loop waits for besides the sockets of libzmq, which polls all of it as one descriptor."""

from __future__ import annotations

import select
from collections.abc import Callable


class Watch:
    """Descriptors, and whom to call when there is something to read."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[], object]] = {}
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Readable whenever a handler is to be called."""
        return self._epoll.fileno()

    def handle(self) -> None:
        """Call the handlers of all descriptors that are ready."""
        for descriptor, handler in [(found, self._handlers.get(found)) for found, _ in self._epoll.poll(0)]:
            # An earlier handler of this turn may have ended it, and its number may be another's by now.
            if handler is not None and self._handlers.get(descriptor) is handler:
                handler()

    def watch(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call ``handler`` whenever the descriptor is readable."""
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

    def watch_edges(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Call ``handler`` whenever something more can be read, whether or not that is ever done."""
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def watch_writable(self, descriptor: int, wanted: bool) -> None:
        """Call the descriptor's handler when it is writable, too."""
        if descriptor in self._handlers:
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def unwatch(self, descriptor: int) -> None:
        """Stop calling; the descriptor is still open."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Watch nothing any more."""
        self._handlers.clear()
        self._epoll.close()
