"""A TCP proxy on loopback that can cut its connections, and hold traffic back or delay it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator


class Proxy:
    """Forwards every connection to one target; its thread ends with ``close``."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._held = False
        self._delay_s = 0.0
        self._late: deque[tuple[float, socket.socket, bytes]] = deque()  # when to forward what
        self._closing = False
        self.cuts = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.02 if not self._late else 0.001):
                with self._lock:
                    self._serve(key.fileobj)  # type: ignore[arg-type]
            with self._lock:
                self._forward_late()

    def _serve(self, source: socket.socket) -> None:
        if source is self._listener:
            client, _ = self._listener.accept()
            self._join(client, socket.create_connection(self._target))
            return
        if self._held or source not in self._peers:
            return
        try:
            chunk = source.recv(1 << 16)
            if chunk:
                if self._delay_s or self._late:
                    self._late.append((time.monotonic() + self._delay_s, source, chunk))
                else:
                    self._peers[source].sendall(chunk)
                return
        except OSError:
            pass  # a reset ends a connection as an end of file does
        self._drop(source)

    def _forward_late(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic() and not self._held:
            _, source, chunk = self._late.popleft()
            if source in self._peers:
                try:
                    self._peers[source].sendall(chunk)
                except OSError:
                    self._drop(source)

    def _join(self, left: socket.socket, right: socket.socket) -> None:
        self._peers[left], self._peers[right] = right, left
        for side in (left, right):
            self._selector.register(side, selectors.EVENT_READ)

    def _drop(self, source: socket.socket) -> None:
        for side in (source, self._peers.pop(source)):
            self._peers.pop(side, None)
            self._selector.unregister(side)
            side.close()

    def cut(self) -> None:
        """End every connection now; new ones are taken."""
        with self._lock:
            self.cuts += 1
            for side in list(self._peers):
                if side in self._peers:
                    self._drop(side)

    def hold(self, held: bool = True) -> None:
        """Forward nothing until it is called with False: the connections stay and are silent."""
        with self._lock:
            self._held = held

    def delay(self, seconds: float) -> None:
        """Forward everything so much later."""
        with self._lock:
            self._delay_s = seconds

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self.cut()
        self._listener.close()
        self._selector.close()


@contextlib.contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    running = Proxy(target)
    try:
        yield running
    finally:
        running.close()
