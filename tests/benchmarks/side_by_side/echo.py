"""The yardsticks: what raw pyzmq does over loopback tcp, without EnvHub.

The other end is in a process of its own, as a hub is. Each message is a single frame.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from side_by_side.peer import announce, peer

# On the way; then the sender waits, and takes no CPU from the way that is measured meanwhile.
QUEUE_MESSAGES_MAX = 4
BUFFER_BYTES = 1 << 16  # of the kernel's for each side, which would hold small messages by the 100,000


@contextlib.contextmanager
def _socket(kind: str) -> Iterator[Any]:
    """A pyzmq socket of this kind."""
    import zmq

    with zmq.Context() as context, context.socket(getattr(zmq, kind)) as socket:
        socket.linger = 0
        yield socket


@contextlib.contextmanager
def echo(request_bytes: int, reply_bytes: int) -> Iterator[Callable[[], object]]:
    """One DEALER/ROUTER round trip per call, with a request and a reply of these sizes."""
    with peer(__name__, "answer", reply_bytes) as address, _socket("DEALER") as dealer:
        dealer.connect(address)
        request = bytes(request_bytes)

        def round_trip() -> None:
            dealer.send(request, copy=False)
            dealer.recv(copy=False)

        yield round_trip


@contextlib.contextmanager
def one_way(message_bytes: int) -> Iterator[Callable[[], object]]:
    """One message of this size per call, of many that come one after another and ask for nothing."""
    with peer(__name__, "pour", message_bytes) as address, _socket("PULL") as pull:
        pull.rcvhwm, pull.rcvbuf = QUEUE_MESSAGES_MAX, buffer_bytes(message_bytes)
        pull.connect(address)
        yield lambda: pull.recv(copy=False)


def buffer_bytes(message_bytes: int) -> int:
    """Size of a socket's buffer in the kernel; -1 leaves it to the kernel, where the messages are large."""
    return BUFFER_BYTES if QUEUE_MESSAGES_MAX * message_bytes < BUFFER_BYTES else -1


def answer(reply_bytes: int) -> None:
    """Be the ROUTER: print its address, then answer every request, until stdin ends."""
    reply = bytes(reply_bytes)
    with _socket("ROUTER") as router:
        router.bind("tcp://127.0.0.1:*")
        announce(router.last_endpoint.decode())
        while True:
            peer, _ = router.recv_multipart(copy=False)
            router.send_multipart([peer, reply], copy=False)


def pour(message_bytes: int) -> None:
    """Be the PUSH: print its address, then send without end, until stdin ends."""
    message = bytes(message_bytes)
    with _socket("PUSH") as push:
        push.sndhwm, push.sndbuf = QUEUE_MESSAGES_MAX, buffer_bytes(message_bytes)
        push.bind("tcp://127.0.0.1:*")
        announce(push.last_endpoint.decode())
        while True:
            push.send(message, copy=False)
