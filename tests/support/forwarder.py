"""A forwarder before a hub, as ``ssh -L`` and docker-proxy are: it accepts connections while its hub is away, too."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Forwarder:
    """Forwards connections to a hub; ends them at once while there is no hub, or it is told to.

    Attributes:
        place: its host and port.
        away: whether the hub is away.
        broken: how many connections it has accepted and ended at once.
        connected: whether a connection was forwarded since the hub was lost.
        says: what it says on a connection that it ends.
    """

    def __init__(self, hub: str) -> None:
        host, _, port = hub.removeprefix("tcp://").rpartition(":")
        self._hub = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.place = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.away = False
        self.broken = 0
        self.connected = False
        self.says = b""
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = server.accept()[0]
                try:
                    hub = None if self.away else socket.create_connection(self._hub)
                except OSError:
                    hub = None
                if hub is None:
                    with client, contextlib.suppress(OSError):
                        client.sendall(self.says)
                    self.broken += 1
                    continue
                self.connected = True
                self._ends += client, hub
                for source, target in ((client, hub), (hub, client)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                target.sendall(chunk)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def lose_hub(self) -> None:
        """End all connections; the hub is away from now on."""
        self.away, self.connected = True, False
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Within the block it listens no more, and its address refuses connections."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        yield
        host, _, port = self.place.partition(":")
        self._server = socket.create_server((host, int(port)))
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def close(self) -> None:
        """End it, and all its connections."""
        self.lose_hub()
        self._server.close()
