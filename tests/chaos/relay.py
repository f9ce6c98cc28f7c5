"""A relay of whole messages between clients and a hub that doubles, delays, reorders and drops them; seeded.

Told to, it also takes the last frame off a reply, as a hub that breaks the protocol.

To the clients it is a ROUTER as the hub is, to the hub a DEALER per client. What it does to bytes on the way a network
might do between two brokers, and PROTOCOL.md says that neither side is confused by it.

A copy that follows at once only meets a request that runs, and one that is delayed a hub that has taken a later one. So
the relay repeats requests when that matters: right after the hub has answered, before the client knows; and long after.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from envhub.protocol.messages import SESSION_OPS

OP, NAMED = 6, slice(16, 40)  # of a prelude: its op, and the token and number that a reply repeats
POLL_MS = 5
KEPT = 50  # requests of each client


@dataclass(frozen=True)
class Mischief:
    """How likely what is, per message; a message that is delayed is overtaken by those that are not.

    Attributes:
        repeat: a copy of the request that a reply belongs to goes to the hub before the reply goes to the client.
        recall: with a request, a copy of any one of the client's last ``KEPT`` goes to the hub.
    """

    double: float = 0.0
    repeat: float = 0.0
    recall: float = 0.0
    delay: float = 0.0
    drop: float = 0.0
    delay_s: float = 0.05


class Relay:
    """Passes messages on until it is closed.

    Attributes:
        address: to connect to instead of the target.
        target: of the connections to come.
        done: how many messages were passed on, doubled, delayed and dropped, repeated, recalled and cut.
        cuts: whether the next reply that has several frames loses its last one.
    """

    def __init__(self, target: str, seed: int = 0) -> None:
        self.target = target
        self._chance = random.Random(seed)
        self._context = zmq.Context()
        self._clients = self._context.socket(zmq.ROUTER)
        self._clients.linger = 0
        self.address = f"tcp://127.0.0.1:{self._clients.bind_to_random_port('tcp://127.0.0.1')}"
        self.mischief = Mischief()
        self.done: Counter[str] = Counter()
        self.cuts = False
        self._hubs: dict[bytes, Any] = {}  # a socket to the hub for each client
        self._requests: dict[bytes, deque[list[bytes]]] = {}  # the last ones of each client
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
                self._from_client(peer, frames)
            for peer, hub in self._hubs.items():
                if hub in ready:
                    self._from_hub(peer, hub, hub.recv_multipart())
            while self._later and self._later[0][0] <= time.monotonic():
                _, _, out, frames = heapq.heappop(self._later)
                self._send(out, frames)
        for each in (self._clients, *self._hubs.values()):
            each.close(linger=0)
        self._context.term()

    def _from_client(self, peer: bytes, frames: list[bytes]) -> None:
        hub = self._hub_of(peer)
        if self._chance.random() < self.mischief.recall and self._requests[peer]:
            self.done["recalled"] += 1
            self._send(hub, self._chance.choice(self._requests[peer]))
        if frames[0][OP] in SESSION_OPS:
            self._requests[peer].append(frames)
        self._pass_on(hub, frames)

    def _from_hub(self, peer: bytes, hub: Any, frames: list[bytes]) -> None:
        if self._chance.random() < self.mischief.repeat:
            for asked in self._requests[peer]:
                if asked[0][NAMED] == frames[0][NAMED]:
                    self.done["repeated"] += 1
                    self._send(hub, asked)
                    break
        if self.cuts and len(frames) > 2:
            self.cuts = False
            self.done["cut"] += 1
            frames = frames[:-1]
        self._pass_on(self._clients, [peer, *frames])

    def _hub_of(self, peer: bytes) -> Any:
        if peer not in self._hubs:
            hub = self._hubs[peer] = self._context.socket(zmq.DEALER)
            hub.linger = 0
            self._requests[peer] = deque(maxlen=KEPT)
            hub.connect(self.target)
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
