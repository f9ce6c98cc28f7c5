"""The page's connections to its hub, of which it asks what any client of the hub's own user may ask."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import envhub

TIMEOUT_S = 5.0
LOOK_S = 0.5  # an answer is given to all that ask within this time
ENDED_S = 10.0  # from one question after ended sessions to the next, while no session ends

T = TypeVar("T")


class Look(NamedTuple):
    """Answers of a hub to what the metrics and the page need of it."""

    stats: dict[str, Any]  # its health among them
    sessions: list[dict[str, Any]]
    ended: list[dict[str, Any]]


class HubClient:
    """Asks the hub in threads of its own, each with a connection: what takes long delays only its equals."""

    def __init__(self, address: str, threads: int) -> None:
        self._address = address
        self._threads = ThreadPoolExecutor(threads, "envhub-web")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._looked_s, self._asked_ended_s = 0.0, -math.inf
        self._names: set[str] = set()
        self._ended: list[dict[str, Any]] = []

    async def ask(self, question: Callable[[Any], T]) -> T:
        """The answer of ``question``, a function of a ``Client``; raises as that does."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.ask_here, question)

    def ask_here(self, question: Callable[[Any], T]) -> T:
        """Ask in this thread; raises as ``ask``."""
        client = getattr(self._own, "client", None)
        if client is None:
            client = self._own.client = envhub.connect(self._address, TIMEOUT_S)
        try:
            return question(client)
        except ConnectionError:
            self._own.client = None
            client.close()
            raise

    async def look(self) -> Look:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.look_here)

    def look_here(self) -> Look:
        """Raises ``EnvHubError`` if the hub does not answer."""
        with self._lock:
            if self._look is None or time.monotonic() - self._looked_s >= LOOK_S:
                self._look = self.ask_here(self._new_look)
                self._looked_s = time.monotonic()
            return self._look

    def _new_look(self, hub: Any) -> Look:
        sessions, now_s = hub.sessions(), time.monotonic()
        names = {row["session"] for row in sessions}
        # The rows of those that have ended are many, and seldom change.
        if not self._names <= names or now_s - self._asked_ended_s >= ENDED_S:
            self._ended, self._asked_ended_s = hub.sessions(ended=True), now_s
        self._names = names
        return Look(hub.stats(), sessions, self._ended)
