"""A relay of whole messages between clients and a hub that doubles, delays, reorders and drops them; seeded.

To the clients it is a ROUTER as the hub is, to the hub a DEALER per client. What it does to bytes on the way a network
might do between two brokers, and PROTOCOL.md says that neither side is confused by it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

POLL_MS = 5


@dataclass(frozen=True)
class Mischief:
    """How likely what is, per message; a message that is delayed is overtaken by those that are not."""

    double: float = 0.0
    delay: float = 0.0
    drop: float = 0.0
    delay_s: float = 0.05


class Relay:
    """Passes messages on until it is closed.

    Attributes:
        address: to connect to instead of the target.
        done: how many messages were passed on, doubled, delayed and dropped.
    """

    def __init__(self, target: str, seed: int = 0) -> None:
        self._target = target
        self._chance = random.Random(seed)
        self._context = zmq.Context()
        self._clients = self._context.socket(zmq.ROUTER)
        self._clients.linger = 0
        self.address = f"tcp://127.0.0.1:{self._clients.bind_to_random_port('tcp://127.0.0.1')}"
        self.mischief = Mischief()
        self.done: Counter[str] = Counter()
        self._hubs: dict[bytes, Any] = {}  # a socket to the hub for each client
        self._later: list[tuple[float, int, Any, list[bytes]]] = []
        self._order = itertools.count()
        self._poller = zmq.Poller()
        self._poller.register(self._clients, zmq.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; messages that are delayed are lost."""
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            ready = dict(self._poller.poll(POLL_MS))
            if self._clients in ready:
                peer, *frames = self._clients.recv_multipart()
                self._pass_on(self._hub_of(peer), frames)
            for peer, hub in self._hubs.items():
                if hub in ready:
                    self._pass_on(self._clients, [peer, *hub.recv_multipart()])
            while self._later and self._later[0][0] <= time.monotonic():
                _, _, out, frames = heapq.heappop(self._later)
                self._send(out, frames)
        for each in (self._clients, *self._hubs.values()):
            each.close(linger=0)
        self._context.term()

    def _hub_of(self, peer: bytes) -> Any:
        if peer not in self._hubs:
            hub = self._hubs[peer] = self._context.socket(zmq.DEALER)
            hub.linger = 0
            hub.connect(self._target)
            self._poller.register(hub, zmq.POLLIN)
        return self._hubs[peer]

    def _pass_on(self, out: Any, frames: list[bytes]) -> None:
        mischief = self.mischief
        copies = 1
        if self._chance.random() < mischief.drop:
            self.done["dropped"] += 1
            copies = 0
        elif self._chance.random() < mischief.double:
            self.done["doubled"] += 1
            copies = 2
        for _ in range(copies):
            if self._chance.random() < mischief.delay:
                self.done["delayed"] += 1
                at_s = time.monotonic() + self._chance.uniform(0, mischief.delay_s)
                heapq.heappush(self._later, (at_s, next(self._order), out, frames))
            else:
                self._send(out, frames)

    def _send(self, out: Any, frames: list[bytes]) -> None:
        self.done["passed on"] += 1
        with contextlib.suppress(zmq.Again):  # to a hub that is gone, or slower than that: one more that is dropped
            out.send_multipart(frames, zmq.NOBLOCK)


@contextlib.contextmanager
def relay(target: str, seed: int = 0) -> Iterator[Relay]:
    """A relay to the target, for the block."""
    running = Relay(target, seed)
    try:
        yield running
    finally:
        running.close()
