"""A TCP proxy on loopback that does to connections what networks do; seeded, in a thread of its own.

``weather`` holds for all bytes from now on: latency, jitter, a rate, pieces of a few bytes, silence. ``cut``,
``half_close`` and ``truncate`` happen once, to every connection that stands. Bytes are never lost inside a connection,
changed or doubled: TCP does not do that, and ``relay.py`` does it to whole messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

CHUNK_BYTES = 1 << 16
POLL_S = 0.005
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: send RST instead of FIN


@dataclass(frozen=True)
class Weather:
    """What happens to every byte."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0  # 0 is no limit
    piece_bytes: int = 0  # so many at a time; 0 is as they come
    held: bool = False  # nothing is forwarded: connections stay and are silent


FAIR = Weather()


class _Link:
    """One connection through the proxy."""

    def __init__(self, client: asyncio.StreamWriter, hub: asyncio.StreamWriter) -> None:
        self.sides = (client, hub)
        self.left_bytes: int | None = None  # after so many more, it is cut

    def reset(self) -> None:
        for side in self.sides:
            connection = side.get_extra_info("socket")
            if connection is not None:
                with contextlib.suppress(OSError):  # it has ended already
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            side.close()

    def half_close(self) -> None:
        for side in self.sides:
            with contextlib.suppress(OSError, RuntimeError):
                side.write_eof()


class ChaosProxy:
    """Forwards every connection to one target, as ``ssh -L`` and docker-proxy do, which accept also while it is away.

    Attributes:
        address: to connect to instead of the target.
        cuts: how often connections were ended.
        away: whether connections are accepted and ended at once, as where nobody listens at the target.
        says: what is said on such a connection.
        broken: how many of them there were.
        connected: whether a connection was forwarded since ``lose_target``.
    """

    def __init__(self, target: str, seed: int = 0) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._chance = random.Random(seed)
        self._weather = FAIR
        self._links: set[_Link] = set()
        self.cuts = self.broken = 0
        self.away = self.connected = False
        self.says = b""
        self._loop = asyncio.new_event_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()

    # --- what happens -------------------------------------------------------------------------------------------------

    def weather(self, weather: Weather = FAIR) -> None:
        """From now on, this."""
        self._weather = weather

    def hold(self, held: bool = True) -> None:
        """Forward nothing until it is called with False."""
        self.weather(Weather(held=held))

    def cut(self) -> None:
        """End every connection with a reset; new ones are taken."""
        self._to_each(_Link.reset)

    def lose_target(self) -> None:
        """End every connection; the target is away from now on."""
        self.away, self.connected = True, False
        self.cut()

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Within the block it listens no more, and its address refuses connections."""
        self._call(self._server.close)
        yield
        again = socket.create_server(("127.0.0.1", int(self.address.rpartition(":")[2])))
        asyncio.run_coroutine_threadsafe(self._listen(again), self._loop).result()

    def half_close(self) -> None:
        """Tell both ends of every connection that the other sends no more."""
        self._to_each(_Link.half_close)

    def truncate(self) -> None:
        """Cut every connection in the middle of what it forwards next."""

        def arm(link: _Link) -> None:
            link.left_bytes = self._chance.randrange(1, 200)

        self._to_each(arm)

    def close(self) -> None:
        """End everything, the thread too."""
        self._call(self._stop)
        self._thread.join()

    def _to_each(self, act: Callable[[_Link], None]) -> None:
        self.cuts += 1
        self._call(lambda: [act(link) for link in list(self._links)])

    def _call(self, act: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                act()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _run(self, listener: socket.socket) -> None:
        self._loop.run_until_complete(self._serve(listener))
        self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        self._stopped = asyncio.Event()
        await self._listen(listener)
        await self._stopped.wait()
        self._server.close()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)  # type: ignore[arg-type]

    async def _listen(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._join, sock=listener)

    def _stop(self) -> None:
        self._weather = FAIR
        for link in self._links:
            link.reset()
        self._stopped.set()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self._weather.held:
            await asyncio.sleep(POLL_S)
        try:
            if self.away:
                raise OSError("the target is away")
            hub_reader, hub_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.write(self.says)
            writer.close()
            self.broken += 1
            return
        self.connected = True
        link = _Link(writer, hub_writer)
        self._links.add(link)
        if self._stopped.is_set():
            link.reset()
        try:
            await asyncio.gather(self._pump(reader, hub_writer, link), self._pump(hub_reader, writer, link))
        finally:
            self._links.discard(link)
            for side in link.sides:
                side.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
        try:
            while True:
                while self._weather.held:
                    await asyncio.sleep(POLL_S)
                chunk = await reader.read(self._weather.piece_bytes or CHUNK_BYTES)
                if not chunk:
                    break
                await self._forward(chunk, writer, link)
        except (OSError, RuntimeError):
            pass  # a reset, or one half that was closed here, ends a connection as an end of file does
        for side in link.sides:
            side.close()

    async def _forward(self, chunk: bytes, writer: asyncio.StreamWriter, link: _Link) -> None:
        weather = self._weather
        delay_s = weather.latency_s + self._chance.uniform(0, weather.jitter_s)
        if weather.bytes_per_s:
            delay_s += len(chunk) / weather.bytes_per_s
        if delay_s:
            await asyncio.sleep(delay_s)
        while self._weather.held:
            await asyncio.sleep(POLL_S)
        if link.left_bytes is not None:
            chunk, link.left_bytes = chunk[: link.left_bytes], link.left_bytes - len(chunk)
        writer.write(chunk)
        await writer.drain()
        if link.left_bytes is not None and link.left_bytes <= 0:
            link.reset()


@contextlib.contextmanager
def proxy(target: str, seed: int = 0) -> Iterator[ChaosProxy]:
    """A proxy to the target, for the block."""
    running = ChaosProxy(target, seed)
    try:
        yield running
    finally:
        running.close()
