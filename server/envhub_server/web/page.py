"""The page, drawn with NiceGUI, and its process: ``main``. Rows are sent to a browser only while it shows them."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import uvicorn
from fastapi import Request
from nicegui import app as nicegui_app
from nicegui import ui

from envhub.diagnosis import findings
from envhub.errors import EnvHubError
from envhub_server.ipc.process_marks import die_with_hub, prctl
from envhub_server.replay import files_in, listed
from envhub_server.web import tables
from envhub_server.web.contents import SAMPLE_S, Web
from envhub_server.web.gate import ADMIN, Gate
from envhub_server.web.metrics import Look
from envhub_server.web.process import WebSettings
from envhub_server.web.tables import Curves, RowTable

NICENESS = 5  # its work waits for that of workers
CONNECTIONS_MAX = 256
_PR_SET_NAME = 15
UPDATE_S, LOOK_S = 2.0, 1.0  # a leak is seen in the memory of five looks
LINES_SHOWN = 300  # of the log, and at most as many rows of a table of what has ended
TABS = ("Sessions", "Workers", "Curves", "Ended", "Slow", "Log", "Replays")
KEYS = "1 to 7: the tabs; / : the filter; Tab and Enter: sort and open"
LEVELS = ("debug", "info", "warning", "error")
COLORS = {"error": "text-negative", "warning": "text-orange-9"}
FLAT = "flat dense no-caps"
HERE = Path(__file__).parent


class View:
    """One browser's page: of the hub, or of one session. Only an administrator has what acts."""

    def __init__(self, web: Web, role: str) -> None:
        self.web, self.is_admin = web, role == ADMIN
        ui.add_css(HERE / "page.css")
        ui.add_head_html(f"<script>{(HERE / 'page.js').read_text()}</script>")
        with ui.header().classes("items-center q-py-xs q-px-md"):
            title = ui.link(f"EnvHub · {web.settings.name}", "/").classes("text-h6 text-white")
            title.style("text-decoration: none")
            self.status = ui.label().classes("text-caption status")
            if self.is_admin:
                ui.button("Drain", icon="logout", on_click=self.drain).props(f"{FLAT} color=white")
            dark = ui.dark_mode(None)
            button = ui.button(icon="contrast", on_click=lambda: dark.set_value(not dark.value))
            button.props(f"{FLAT} round color=white aria-label='Light or dark'")
        ui.timer(LOOK_S, self.look)

    async def look(self) -> Look | None:
        try:
            look = await self.web.look()
        except EnvHubError as error:
            self.status.text = f"no answer: {error}"
            return None
        stats, capacity = look.stats, look.stats["capacity"]
        cpus = f"{capacity['cpus_free']} of {capacity['cpus']} CPUs free"
        up = f"up for {stats['uptime_s'] / 3600:.1f} h"
        self.status.text = f"{stats['status']} · {len(look.sessions)} sessions · {cpus} · {up}"
        return look

    async def act(self, question: Callable[[Any], Any], done: str = "") -> Any:
        """Show that the hub has done this, or why it has not; returns its answer, None for a refusal."""
        try:
            answer = await self.web.acting.ask(question)
        except (EnvHubError, ValueError) as error:
            ui.notify(str(error), type="negative", multi_line=True, close_button="OK", timeout=0)
            return None
        if done:
            ui.notify(done, type="positive")
        return answer

    # --- the page of the hub ------------------------------------------------------------------------------------------

    def hub(self, tab: str) -> None:
        self.tabs = ui.tabs().classes("full-width").props("dense no-caps align=left outside-arrows mobile-arrows")
        with self.tabs:
            for each in TABS:
                ui.tab(each)
        with ui.tab_panels(self.tabs, value=tab if tab in TABS else TABS[0]).classes("full-width") as panels:
            panels.props(":animated=false")
            for each in TABS:
                with ui.tab_panel(each).classes("q-pa-none q-pt-sm"):
                    getattr(self, f"draw_{each.lower()}")()
        ui.keyboard(self.on_key)
        ui.timer(UPDATE_S, self.update)
        self.tabs.on_value_change(self.update)

    def draw_sessions(self) -> None:
        self.filter = ui.input(placeholder="Filter  ( / )").props("dense outlined clearable").classes("q-mb-sm")
        self.sessions = RowTable(tables.SESSIONS, "session", "no session")
        self.filter.on_value_change(lambda event: self.sessions.choose(event.value or ""))

    def draw_workers(self) -> None:
        self.workers = RowTable(("session", *tables.WORKERS), "key", "no worker")

    def draw_curves(self) -> None:
        self.curves = Curves()

    def draw_ended(self) -> None:
        self.ended = RowTable(tables.ENDED, "session", "no session has ended")

    def draw_slow(self) -> None:
        self.slow = RowTable(tables.SLOW, "n", "no request was slow")

    def draw_log(self) -> None:
        self.level = ui.select([*LEVELS], value="info", label="From level", on_change=self.draw_log_again)
        self.level.props("dense outlined").style("width: 130px")
        self.log = ui.log(max_lines=LINES_SHOWN)
        self.last_line = -1  # its number

    def draw_replays(self) -> None:
        folder = self.web.settings.replays
        files = [path for path, _ in files_in(Path(folder))][:LINES_SHOWN] if folder else []
        ui.label(f"They are in {folder or 'no folder'}. A click copies the command that runs one again.")
        drawn = RowTable(tables.REPLAYS, "name", "no replay")
        drawn.show([dict(zip(tables.REPLAYS, listed(path), strict=True)) for path in files if path.exists()])
        drawn.on("choose", lambda event: self.copy(f"envhub replay {event.args['name']}"))
        if self.web.settings.films:
            ui.label(f"Films in {self.web.settings.films}").classes("text-weight-medium q-mt-md")
        for path in self.web.films():
            ui.button(str(path), icon="movie", on_click=lambda _, path=path: self.show_film(path)).props(FLAT)

    def copy(self, text: str) -> None:
        ui.clipboard.write(text)
        ui.notify(f"copied: {text}")

    def show_film(self, path: Path) -> None:
        with ui.dialog(value=True), ui.card():
            ui.video(f"/film/{quote(str(path))}").classes("film")

    def on_key(self, event: Any) -> None:
        if not event.action.keydown or event.modifiers.ctrl or event.modifiers.alt or event.modifiers.meta:
            return
        if event.key.number in range(1, len(TABS) + 1):
            self.tabs.value = TABS[event.key.number - 1]
        elif event.key.name == "/":
            self.tabs.value = TABS[0]
            self.filter.run_method("focus")
        elif event.key.name == "?":
            ui.notify(KEYS)

    async def update(self) -> None:
        look, tab = await self.look(), self.tabs.value
        if tab == "Log":
            self.write_log()
        elif look is None:
            return
        elif tab == "Sessions":
            troubles = findings(look.sessions, self.web.memory)
            self.sessions.show([tables.session_row(each, troubles) for each in look.sessions])
        elif tab == "Workers":
            self.workers.show(tables.worker_rows(look.sessions))
        elif tab == "Curves":
            self.curves.show(self.web.curves())
        elif tab == "Ended":
            self.ended.show([tables.session_row(each, ()) for each in look.ended[: -LINES_SHOWN - 1 : -1]])
        elif tab == "Slow":
            rows = (await self.act(lambda hub: hub.slow()) or [])[::-1]
            self.slow.show([{**row, "n": n, "envs": tables.listed(row["envs"])} for n, row in enumerate(rows)])

    def draw_log_again(self) -> None:
        self.last_line = -1
        self.log.clear()
        self.write_log()

    def write_log(self) -> None:
        for number, line in [*self.web.lines]:
            if number > self.last_line:
                self.last_line, level = number, line.get("level", "info")
                if level not in LEVELS[: LEVELS.index(self.level.value)]:
                    self.log.push(tables.log_text(line), classes=COLORS.get(level, ""))

    # --- the page of a session ----------------------------------------------------------------------------------------

    def session(self, name: str) -> None:
        self.name = name
        with ui.row().classes("items-center full-width"):
            ui.label(f"Session {name}").classes("text-h6")
            self.trouble = ui.badge(color="negative")
            ui.space()
            ui.button("Stacks", icon="layers", on_click=self.stacks).props("outline dense no-caps")
            if self.is_admin:
                ui.button("Restart a worker", icon="restart_alt", on_click=self.restart).props("outline dense no-caps")
                ui.button("End", icon="stop", color="negative", on_click=self.end).props("dense no-caps")
        self.facts = ui.element("div").classes("facts")
        self.reasons = ui.label().classes("plain")
        self.workers = RowTable(tables.WORKERS, "key", "no worker")
        with ui.row().classes("items-center"):
            env = ui.number("Frame of env", value=0, min=0, precision=0).props("dense outlined")
            ui.switch("Watch", on_change=lambda event: self.watch(int(env.value or 0) if event.value else None))
        self.image = ui.element("img").classes("frame").props("alt='The frame of the env'")
        self.note = ui.label().classes("text-negative")
        self.curves = Curves(name)
        ui.timer(UPDATE_S, self.update_session)

    async def update_session(self) -> None:
        if (look := await self.look()) is None:
            return
        row = next((each for each in [*look.sessions, *look.ended] if each["session"] == self.name), None)
        if row is None:
            self.reasons.text = "The hub has no such session, and it is none of the last that ended."
            return
        self.facts.clear()
        with self.facts:
            for name, text in tables.facts_of(row).items():
                with ui.element("div"):
                    ui.html(f"<small>{name}</small>", sanitize=False)
                    ui.label(text)
        troubles = [each for each in findings(look.sessions, self.web.memory) if each.session == self.name]
        self.trouble.text = ", ".join({each.trouble for each in troubles})
        self.trouble.set_visibility(bool(troubles))
        texts = [f"{each['ago_s']:.0f} s ago, worker {each['worker']}: {each['why']}" for each in row["reasons"]]
        texts += [f"envhub replay {each}" for each in row["replays"]]
        self.reasons.text = "\n".join([*map(str, troubles), *texts])
        self.workers.show(tables.worker_rows([row]) if "processes" in row else [])
        self.curves.show(self.web.curves(self.name))

    def watch(self, env: int | None) -> None:
        url = "" if env is None else f"/frame/{quote(self.name)}/{env}"
        ui.run_javascript(f"watchFrames(getHtmlElement({self.image.id}), getHtmlElement({self.note.id}), {url!r})")

    async def stacks(self) -> None:
        rows = await self.act(lambda hub: hub.stack(self.name)) or []
        with ui.dialog(value=bool(rows)), ui.card().style("max-width: 95vw; width: 1000px"):
            for row in rows:
                head = f"worker {row['worker']}, process {row['pid']}, envs {row['envs']}"
                ui.label(head).classes("text-weight-medium")
                ui.label(row["stacks"] or row["problem"]).classes("plain")

    # --- acts ---------------------------------------------------------------------------------------------------------

    def ask_for(self, title: str, button: str, number: str, text: str, done: str, act: Callable[..., Any]) -> None:
        """Show a dialog with a number, unless that has no label, and a text; ``act`` gets them, after the client."""
        with ui.dialog(value=True) as dialog, ui.card().style("width: min(95vw, 460px)"):
            ui.label(title).classes("text-h6")
            fields: list[Any] = [ui.number(number, min=0)] if number else []
            fields.append(ui.input(text))
            for each in fields:
                each.classes("full-width")

            async def press() -> None:
                dialog.close()
                values = [each.value for each in fields]
                await self.act(lambda hub: act(hub, *values), done)

            with ui.row().classes("full-width justify-end"):
                ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
                ui.button(button, color="negative", on_click=press).props("no-caps")

    def end(self) -> None:
        texts = f"End session {self.name}", "End it", "", "Why? Its user reads this.", f"session {self.name} has ended"
        self.ask_for(*texts, lambda hub, why: hub.end(self.name, why))

    def restart(self) -> None:
        texts = "Restart a worker", "Restart it", "Env, whose worker is restarted", "Why?", "the worker was restarted"
        self.ask_for(*texts, lambda hub, env, why: hub.restart(self.name, int(env or 0), why))

    def drain(self) -> None:
        title = "Make no session any more, and end with the last one"
        texts = "Drain the hub", "Seconds until all end, if any", "Message to their users", "the hub drains"
        self.ask_for(title, *texts, lambda hub, seconds, message: hub.drain(seconds or None, message))


def main(arguments: Sequence[str]) -> None:
    """Serve the page until the hub ends: ``HUB_PID LISTENER_FD``, with ``WebSettings`` by stdin."""
    die_with_hub(int(arguments[0]))
    prctl(_PR_SET_NAME, b"envhub-web")
    os.nice(NICENESS)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=WebSettings)
    web = Web(settings)
    app = web.application()

    @ui.page("/")
    def hub(request: Request, tab: str = "") -> None:
        View(web, request.scope["role"]).hub(tab)

    @ui.page("/session/{name}")
    def session(request: Request, name: str) -> None:
        View(web, request.scope["role"]).session(name)

    nicegui_app.timer(SAMPLE_S, web.sample)
    ui.run_with(app, title="EnvHub", dark=None, tailwind=False, show_welcome_message=False)
    threading.Thread(target=web.read_log, name="envhub-log", daemon=True).start()
    config = uvicorn.Config(Gate(app, settings.access), log_config=None, access_log=False, lifespan="on")
    config.limit_concurrency = CONNECTIONS_MAX
    uvicorn.Server(config).run([socket.socket(fileno=int(arguments[1]))])
