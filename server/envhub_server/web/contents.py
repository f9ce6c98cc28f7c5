"""Contents of the page besides the page itself: metrics, probes, frames, films, the log, and samples of the hub.

All come from the hub, of which the page asks what any client of the hub's own user may ask. The samples are those of
the last hour, of the hub and of its sessions, from which the page draws its curves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

import envhub
from envhub.diagnosis import Memory, remember
from envhub.errors import EnvHubError
from envhub_server.web.metrics import HubCollector, Look, Row
from envhub_server.web.process import LOG_LINES_MAX, WebSettings

LOOKERS, ACTORS = 2, 6  # threads that look, and that act or draw
FRAME_S = 0.1  # from one frame of an env to the next, for however many browsers
FRAMES_MAX = 16  # envs of which the last frame is kept
FILMS_MAX = 200  # on the page
FILM = ".mp4"
SAMPLE_S = 5.0  # from one sample to the next
KEPT_S = 3600.0
SERIES_MAX = 256  # sessions that have curves; those that were sampled longest ago lose theirs
HUB = ""  # the name of the hub's own series
FIELDS = ("sessions", "steps_per_s", "p50_ms", "p99_ms", "env_p99_ms", "cpu", "memory_bytes")
_WIDTH = 1 + len(FIELDS)  # a sample begins with its time
TIMEOUT_S = 5.0
LOOK_S = 0.5  # an answer is given to all that ask within this time
ENDED_S = 10.0  # from one question after ended sessions to the next, while no session ends

T = TypeVar("T")


def values_of(row: Row) -> list[float]:
    """The values of a session's row, in the order of ``FIELDS``; NaN for those that are not known."""
    step, env = row.get("step_ms") or {}, row.get("env_ms") or {}
    each = (1.0, row.get("steps_per_s"), step.get("p50"), step.get("p99"), env.get("p99"))
    return [nan if value is None else float(value) for value in (*each, row.get("cpu"), row.get("memory_bytes"))]


def totals_of(rows: Sequence[Sequence[float]]) -> list[float]:
    """The values of a hub: sums, and of times those of its slowest session."""
    columns = [[value for value in column if not isnan(value)] for column in zip(*rows, strict=True)]
    columns = columns or [[] for _ in FIELDS]
    return [
        max(column, default=nan) if name.endswith("_ms") else sum(column)
        for name, column in zip(FIELDS, columns, strict=True)
    ]


class History:
    """The samples of each series, in as little memory as they have numbers."""

    def __init__(self) -> None:
        self._series: dict[str, array[float]] = {}

    def add(self, now_s: float, sessions: Sequence[Row]) -> None:
        """Take a sample of these rows of ``Client.sessions``."""
        values = {row["session"]: values_of(row) for row in sessions}
        for name, sample in [(HUB, totals_of([*values.values()])), *values.items()]:
            series = self._series.pop(name, array("d"))
            series.extend((now_s, *sample))
            self._series[name] = series  # at the end: the first ones were sampled longest ago
        for name, series in [*self._series.items()]:
            old = next((n for n in range(0, len(series), _WIDTH) if series[n] > now_s - KEPT_S), len(series))
            del series[:old]
            if not series or (len(self._series) > SERIES_MAX + 1 and name != HUB):
                del self._series[name]

    def curves(self, now_s: float, name: str = HUB) -> dict[str, list[list[float | None]]]:
        """By field, the points of a curve: minutes before ``now_s``, and the value, None where it was not known."""
        series = self._series.get(name, array("d"))
        minutes = [round((at_s - now_s) / 60, 3) for at_s in series[::_WIDTH]]
        return {
            field: [
                [at, None if isnan(value) else round(value, 3)]
                for at, value in zip(minutes, series[n::_WIDTH], strict=True)
            ]
            for n, field in enumerate(FIELDS, 1)
        }


class HubClient:
    """Asks the hub in threads of its own, each with a connection: what takes long delays only its equals."""

    def __init__(self, address: str, threads: int) -> None:
        self._address = address
        self._threads = ThreadPoolExecutor(threads, "envhub-web")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._looked_s, self._asked_ended_s = 0.0, -inf
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


class Web:
    """Contents of the page and of the metrics."""

    def __init__(self, settings: WebSettings) -> None:
        self.settings = settings
        self.looking, self.acting = HubClient(settings.hub, LOOKERS), HubClient(settings.hub, ACTORS)
        # By session and env, the last frame of each env that is watched, and when it was asked for.
        self._drawn: OrderedDict[tuple[str, int], asyncio.Task[tuple[float, bytes]]] = OrderedDict()
        self.history, self.registry = History(), CollectorRegistry()
        self.collector = HubCollector(self.looking.look_here, settings.name, self.registry)
        ProcessCollector("envhub_web", registry=self.registry)
        self.memory: Memory = {}  # of workers, of which leaks are read
        self.lines: deque[tuple[int, dict[str, Any]]] = deque(maxlen=LOG_LINES_MAX)  # numbered

    def read_log(self) -> None:
        """Keep the lines of the hub's log that come by stdin, until the hub ends."""
        for number, line in enumerate(sys.stdin.buffer):
            with contextlib.suppress(msgspec.DecodeError):  # a line that did not fit into the pipe
                self.lines.append((number, msgspec.json.decode(line, type=dict)))

    async def look(self) -> Look:
        look = await self.looking.look()
        self.memory = remember(self.memory, look.sessions)
        return look

    async def sample(self) -> None:
        with contextlib.suppress(EnvHubError):
            look = await self.look()
            self.collector.take(look)
            self.history.add(time.monotonic(), look.sessions)

    async def problem(self) -> str:
        """The reason why the hub should get no new sessions; empty if it is ready."""
        try:
            look = await self.looking.look()
            unready, status = look.stats["unready"], look.stats["status"]
            if status != "ok":
                return str(status)
            if unready and {*await self.looking.ask(lambda hub: hub.envs())} <= unready.keys():
                return f"no env can be made: {next(iter(unready.values()))}"
        except EnvHubError as error:
            return str(error)
        return ""

    async def png(self, session: str, env: int) -> bytes:
        """Raises ``EnvHubError`` where the env cannot be drawn."""
        key, task = (session, env), self._drawn.get((session, env))
        if task is not None and task.done() and (task.exception() or time.monotonic() - task.result()[0] >= FRAME_S):
            task = None
        if task is None:
            task = self._drawn[key] = asyncio.create_task(self._draw(session, env))
            self._drawn.move_to_end(key)
            if len(self._drawn) > FRAMES_MAX:
                self._drawn.popitem(last=False)
        return (await asyncio.shield(task))[1]

    async def _draw(self, session: str, env: int) -> tuple[float, bytes]:
        return time.monotonic(), await self.acting.ask(lambda hub: hub.frame(session, env).png())

    def curves(self, session: str = HUB) -> dict[str, list[list[float | None]]]:
        return self.history.curves(time.monotonic(), session)

    def films(self) -> list[Path]:
        folder = Path(self.settings.films)
        if not self.settings.films:
            return []
        paths = [path for path in folder.rglob(f"*{FILM}") if path.is_file() and not path.is_symlink()]
        return [path.relative_to(folder) for path in sorted(paths, key=os.path.getmtime, reverse=True)[:FILMS_MAX]]

    def application(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        @app.get("/metrics")
        async def metrics(request: Request) -> Response:
            encode, kind = choose_encoder(request.headers.get("accept", ""))
            return Response(await asyncio.to_thread(encode, self.registry), media_type=kind)

        @app.get("/livez")
        async def livez() -> Response:
            try:
                await self.looking.look()
            except EnvHubError as error:
                return PlainTextResponse(str(error), 503)
            return PlainTextResponse("ok")

        @app.get("/readyz")
        async def readyz() -> Response:
            why = await self.problem()
            return PlainTextResponse(why or "ok", 503 if why else 200)

        @app.get("/frame/{session}/{env}")
        async def frame(session: str, env: int) -> Response:
            try:
                return Response(await self.png(session, env), media_type="image/png")
            except (EnvHubError, ValueError) as error:
                return PlainTextResponse(str(error), 409)

        @app.get("/film/{name:path}")
        async def film(name: str) -> Response:
            folder = Path(self.settings.films or os.devnull).resolve()
            path = (folder / name).resolve()
            if path.suffix != FILM or not path.is_relative_to(folder) or not path.is_file():
                return PlainTextResponse("there is no such film", 404)
            return FileResponse(path, media_type="video/mp4")

        return app
