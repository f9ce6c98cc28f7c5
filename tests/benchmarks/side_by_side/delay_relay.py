"""A relay of TCP connections that delays all bytes by a fixed time, in a process of its own."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

CHUNK_BYTES = 1 << 18
SPIN_S = 0.001  # before a delivery, in which the relay does not sleep: a sleep may be longer than that


@contextlib.contextmanager
def relayed(address: str, delay_s: float) -> Iterator[str]:
    """The address of a relay to this one, which delays each direction by ``delay_s``."""
    process = subprocess.Popen([sys.executable, __file__, address, str(delay_s)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def relay(target: str, delay_s: float) -> None:
    """Relay all connections until the process is killed."""
    host, _, port = target.removeprefix("tcp://").rpartition(":")
    selector, listener = selectors.DefaultSelector(), socket.create_server(("127.0.0.1", 0))
    selector.register(listener, selectors.EVENT_READ)
    print(f"tcp://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    due: list[tuple[float, int, socket.socket, bytes]] = []
    order = itertools.count()
    while True:
        sleep_s = max(0.0, due[0][0] - time.monotonic() - SPIN_S) if due else None
        for key, _ in selector.select(sleep_s):
            source = key.fileobj
            assert isinstance(source, socket.socket)
            if source is listener:
                ends = listener.accept()[0], socket.create_connection((host, int(port)))
                for end, other in (ends, ends[::-1]):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(end, selectors.EVENT_READ, other)
                continue
            chunk = b""
            with contextlib.suppress(ConnectionError):  # the same as its end
                chunk = source.recv(CHUNK_BYTES)
            heapq.heappush(due, (time.monotonic() + delay_s, next(order), key.data, chunk))
            if not chunk:
                selector.unregister(source)
        while due and due[0][0] <= time.monotonic():
            _, _, end, chunk = heapq.heappop(due)
            with contextlib.suppress(OSError):  # the other side has ended it
                end.sendall(chunk) if chunk else end.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    relay(sys.argv[1], float(sys.argv[2]))
