"""Who drives a session: the hub, or its client, which then steps in the session's memory without the hub."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence

from envhub.arena.memory import DRIVER_CLIENT, DRIVER_HUB, Arena
from envhub.protocol import messages
from envhub.transport.fd_passing import DESCRIPTORS_MAX
from envhub_server.loop.poller import Watch

SO_PEERPIDFD = 77  # of Linux 6.5; Python's socket module does not name it


class Driving:
    """The drive of one session, which only the hub hands over, and only while no row is with a worker.

    Attributes:
        driver: who has it.
        lent: whether a client has ever had the memory.
    """

    def __init__(self, watch: Watch, on_gone: Callable[[], None]) -> None:
        """The hub's for now; ``on_gone`` hears that the client has left its side socket."""
        self.driver = DRIVER_HUB
        self._watch = watch
        self._on_gone = on_gone
        self._side: socket.socket | None = None  # of the client, while it may drive
        self._client = -1  # a pidfd of its process: a child that it forked may hold its end of the socket
        self.lent = False

    @property
    def shared(self) -> bool:
        """Whether the client may drive."""
        return self._side is not None

    def share(self, side: socket.socket, shared: messages.Shared, descriptors: Sequence[int]) -> bool:
        """Give the client behind this socket what it needs to drive; False where it has gone, or does not read."""
        body = messages.pack(shared)
        try:
            for start in range(0, len(descriptors), DESCRIPTORS_MAX):
                head = len(body).to_bytes(4, "little") + body if start == 0 else b"\0"
                socket.send_fds(side, [head], descriptors[start : start + DESCRIPTORS_MAX])
        except OSError:
            return False
        self._side, self.lent = side, True
        self._watch.watch(side.fileno(), self._on_gone)
        with contextlib.suppress(OSError):  # an older kernel
            self._client = side.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
            os.set_inheritable(self._client, False)
            self._watch.watch(self._client, self._on_gone)
        return True

    def give(self, arena: Arena) -> None:
        """Have the client drive, if it may and nothing is under way."""
        if self.shared and self.driver == DRIVER_HUB and arena.quiescent():
            self._hand_over(arena, DRIVER_CLIENT)

    def take(self, arena: Arena) -> bool:
        """Have the hub drive; False while a step of the client's is under way."""
        if not arena.quiescent():
            return False
        self._hand_over(arena, DRIVER_HUB)
        return True

    def _hand_over(self, arena: Arena, driver: int) -> None:
        self.driver = driver
        arena.hand_over(driver)

    def revoke(self, arena: Arena) -> None:
        """Send a client that waits for its step, or is about to drive one, to ask what became of its session."""
        if self._side is not None:
            arena.revoke()
            with contextlib.suppress(OSError):  # it has gone
                self._side.shutdown(socket.SHUT_RDWR)  # which wakes it

    def wind_up(self, arena: Arena) -> None:
        """Have the client begin no other step."""
        if self._side is not None:
            arena.wind_up()

    def close(self) -> None:
        """Have nobody but the hub drive from now on."""
        if self._side is not None:
            self._watch.unwatch(self._side.fileno())
            self._side.close()
            self._side = None
        if self._client >= 0:
            self._watch.unwatch(self._client)
            os.close(self._client)
            self._client = -1
