"""The socket by which messages of clients come and go, and the one by which libzmq reports its connections."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq

from envhub.transport import sockets
from envhub_server.network.listener import seed_routing_ids

RECEIVE_QUEUE_MESSAGES_MAX = 16  # of one client, which sends a request at a time
LINGER_MS = 2000

_MONITORED = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Router:
    """The ROUTER of one hub, and its monitor. It owns both, and their context.

    Attributes:
        context: of libzmq.
        socket: the ROUTER.
        descriptor: readable when the ROUTER may have a message.
        monitor_descriptor: likewise, of the monitor.
        is_readable: called without arguments, returns a true value if a message can be read. ``getsockopt(zmq.EVENTS)``
            would take twice the time to say it: pyzmq makes an enum of the option.
    """

    def __init__(self) -> None:
        self.context: Any = None
        self.socket: Any = None
        self._monitor: Any = None
        self.descriptor = self.monitor_descriptor = -1
        self.is_readable: Callable[[], Sequence[Any]] = lambda: ()

    def open(self, message_bytes_max: int) -> None:
        """Make the sockets; a larger frame ends its connection."""
        self.context = zmq.Context()
        sockets.begin_zero_copy(self.context)
        seed_routing_ids()
        router = sockets.open_socket(self.context, zmq.ROUTER, message_bytes_max, RECEIVE_QUEUE_MESSAGES_MAX)
        self.socket = router
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.LINGER, LINGER_MS)
        # No heartbeats of its own: libzmq (4.3.5) aborts at one of a connection that ended while its queue was full.
        # Those of the clients say for how long they may be silent; the kernel asks after a client that sends none.
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
        router.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        router.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        self._monitor = sockets.open_monitor(router, _MONITORED)
        self.descriptor, self.monitor_descriptor = router.FD, self._monitor.FD
        # ``POLLIN`` as a plain number, as in ``envhub.transport.sockets``.
        self.is_readable = functools.partial(zmq.zmq_poll, [(router, int(zmq.POLLIN))], 0)

    @property
    def is_open(self) -> bool:
        """True if there are sockets, or were."""
        return self.socket is not None

    def events(self) -> Iterator[tuple[int, int]]:
        """The events of the monitor that have come, each with the descriptor of its connection."""
        while self._monitor.poll(0):
            yield sockets.read_monitor(self._monitor, zmq.NOBLOCK)

    def reaches(self, peer: bytes, frame: bytes) -> bool:
        """Send a frame to the peer; returns False if its connection has ended."""
        try:
            sockets.send(self.socket, [peer, frame])
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close the sockets; what was sent goes on its way."""
        self.socket.monitor(None, 0)
        self._monitor.close()
        self.socket.close()
