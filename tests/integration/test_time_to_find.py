"""The time after which a trouble of an env is shown: by a command, by ``envhub top``, and on the web page.

``pytest -m long -n 0 -s`` of this file prints the times.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from envhub_client.tools.watch import TURN_S, Watch
from hubs import ServedHub
from test_operating import running
from test_web_page import BEARER, PASSWORD, Page

socketio = pytest.importorskip("socketio")

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
SHOWN_S = 10.0  # at most
GIVE_UP_S = 60.0
Troubles = set[tuple[str, str]]  # each with the name of its session


def of_commands(hub: ServedHub) -> Iterator[Troubles]:
    command = [sys.executable, "-m", "envhub", "top", hub.ipc, "--once", "--json"]
    while True:
        report = json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)
        yield {(each["trouble"], each["session"]) for each in report["findings"]}


def of_top(hub: ServedHub) -> Iterator[Troubles]:
    with Watch([hub.ipc], 5.0) as watch:
        while True:
            watch.update()
            yield {(each.trouble, each.session) for each in watch.findings}
            time.sleep(TURN_S)


def first_times(looks: Iterator[Troubles], wanted: Troubles) -> dict[str, float]:
    """The time of the first look at which each of these troubles is shown."""
    times: dict[str, float] = {}
    until_s = time.monotonic() + GIVE_UP_S
    for found in looks:
        for trouble, _ in found & wanted:
            times.setdefault(trouble, time.monotonic())
        if len(times) == len(wanted) or time.monotonic() > until_s:
            return times
    return times


async def times_on_page(page: Page, wanted: Troubles, begin: Callable[[], float]) -> tuple[float, dict[str, float]]:
    """The time at which troubles begin, once the page is open, and the first times on it, read as a browser gets it."""
    times, shown = dict[str, float](), asyncio.Event()
    (client,) = re.findall(r"'client_id': '([^']+)'", page.get("/", Accept="text/html", **BEARER)[1])
    query = {"client_id": client, "tab_id": "1", "document_id": "1", "next_message_id": 0, "implicit_handshake": "true"}
    browser = socketio.AsyncClient()

    @browser.on("update")  # type: ignore[untyped-decorator]
    def on_update(elements: dict[str, Any]) -> None:
        for element in elements.values():
            rows = element.get("props", {}).get("rows", ()) if isinstance(element, dict) else ()
            for trouble, session in wanted:
                if any(row["session"] == session and trouble in row["trouble"].split(", ") for row in rows):
                    times.setdefault(trouble, time.monotonic())
        if len(times) == len(wanted):
            shown.set()

    url, path = f"http://127.0.0.1:{page.port}?{urlencode(query)}", "/_nicegui_ws/socket.io"
    await browser.connect(url, headers=BEARER, socketio_path=path, transports=["websocket"], wait_timeout=30)
    began_s = begin()
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(shown.wait(), GIVE_UP_S)
    await browser.disconnect()
    return began_s, times


def test_each_trouble_is_shown_within_ten_seconds(tmp_path: Path) -> None:
    web = {"ENVHUB_WEB_PASSWORD": PASSWORD}
    with running(tmp_path, "--web", "127.0.0.1:0", **web) as (hub, every), ThreadPoolExecutor(2) as threads:
        page = Page(hub, besides=int(hub.tcp.rpartition(":")[2]))
        wanted = {(each.kind.trouble, each.session) for each in every if each.kind.trouble}
        looks = dict[str, Future[dict[str, float]]]()

        def begin() -> float:
            every[0].begins.set()
            for name, look in (("command", of_commands), ("top", of_top)):
                looks[name] = threads.submit(first_times, look(hub), wanted)
            return time.monotonic()

        began_s, on_page = asyncio.run(times_on_page(page, wanted, begin))
        found = {name: look.result() for name, look in looks.items()} | {"page": on_page}
        print()
        for name, times in found.items():
            after_s = {trouble: at_s - began_s for trouble, at_s in sorted(times.items())}
            print(f"{name}: " + ", ".join(f"{trouble} after {each_s:.1f} s" for trouble, each_s in after_s.items()))
            assert len(after_s) == len(wanted) and max(after_s.values()) <= SHOWN_S, name
