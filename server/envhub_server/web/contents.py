"""Contents of the page besides the page itself: metrics, probes, frames, films, the log, and samples of the hub."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from envhub.diagnosis import Memory, remember
from envhub.errors import EnvHubError
from envhub_server.web.history import HUB, History
from envhub_server.web.hub_client import HubClient, Look
from envhub_server.web.metrics import HubCollector
from envhub_server.web.process import LOG_LINES_MAX, WebSettings

LOOKERS, ACTORS = 2, 6  # threads that look, and that act or draw
FRAME_S = 0.1  # from one frame of an env to the next, for however many browsers
FRAMES_MAX = 16  # envs of which the last frame is kept
FILMS_MAX = 200  # on the page
FILM = ".mp4"


class Frames:
    """The last frame of each env that is watched, which is drawn when it is asked for."""

    def __init__(self, hub: HubClient) -> None:
        self._hub = hub
        self._drawn: OrderedDict[tuple[str, int], asyncio.Task[tuple[float, bytes]]] = OrderedDict()

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
        return time.monotonic(), await self._hub.ask(lambda hub: hub.frame(session, env).png())


class Web:
    """Contents of the page and of the metrics."""

    def __init__(self, settings: WebSettings) -> None:
        self.settings = settings
        self.looking, self.acting = HubClient(settings.hub, LOOKERS), HubClient(settings.hub, ACTORS)
        self.frames = Frames(self.acting)
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
                return Response(await self.frames.png(session, env), media_type="image/png")
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
