"""``envhub top``: a table of several hubs' sessions, printed once, or on a terminal that a pilot drives."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from envhub_client.tools.watch import HEADINGS, Watch
from hubs import ServedHub, free_port, serve

import envhub

SIMS = ("counter=sims:Counter", "naughty=sims:Naughty")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), *SIMS) as served:
        yield served


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "envhub", "top", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=60)


@pytest.mark.long
def test_once_prints_a_row_of_each_session_and_of_a_hub_that_does_not_answer(hub: ServedHub) -> None:
    absent = f"tcp://127.0.0.1:{free_port()}"
    with closing(envhub.make_vec("counter", 3, hub=hub.tcp, label="run 7")) as envs:
        envs.reset()
        ran = top(hub.ipc, absent, "--look", "1.5", "--timeout", "0.5")
        session, lost = (dict(zip(HEADINGS, line.split("\t"), strict=False)) for line in ran.stdout.splitlines())
        assert session["env"] == "3 x counter" and session["label"] == "run 7" and session["hub"] == hub.ipc
        assert lost["hub"] == absent and lost["trouble"] == "unreachable" and "no hub answered" in ran.stderr
        assert ran.returncode == 1
        report = json.loads(top(hub.ipc, "--json", "--look", "1").stdout)
        (row,) = report["sessions"]
        assert (row["session"], row["hub"], row["num_envs"]) == (session["session"], hub.ipc, 3)
        assert report["hubs"] == [{"name": hub.ipc, "state": "ok", "why": ""}] and report["findings"] == []


@pytest.mark.long
def test_names_for_several_hubs_are_looked_up_and_one_that_stands_for_none_is_a_row(hub: ServedHub) -> None:
    port = hub.tcp.rpartition(":")[2]
    ran = top(f"dns://localhost:{port}", "dns://no-such-host.invalid:1", "--look", "3", "--timeout", "2")
    rows = [dict(zip(HEADINGS, line.split("\t"), strict=False)) for line in ran.stdout.splitlines()]
    states = {row["hub"]: row["phase"] for row in rows}
    assert states == {"dns://no-such-host.invalid:1": "unreachable", f"localhost:{port}": "ok"}


# --- on a terminal ----------------------------------------------------------------------------------------------------


class Driven:
    """The screen of ``envhub top`` and the keys that an operator presses."""

    def __init__(self, app: Any, pilot: Any) -> None:
        self.app, self.pilot = app, pilot

    def column(self, heading: str) -> list[str]:
        table, place = self.app.sessions_table, HEADINGS.index(heading)
        return [table.get_row_at(number)[place].plain for number in range(table.row_count)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the screen to show this."""
        for _ in range(600):
            await self.pilot.pause(0.1)
            if condition():
                return
        cells = [self.column(each) for each in ("hub", "session", "trouble")]
        raise AssertionError(f"{cells} {[each.message for each in self.app._notifications]}")

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def opens(self, key: str) -> None:
        """Press a key that opens a box."""
        await self.press(key)
        await self.until(lambda: len(self.app.screen_stack) == 2)

    def text(self) -> str:
        return str(self.app.screen.query_one("#text").render())


def drive(hubs: list[str], steps: Callable[[Driven], Awaitable[None]]) -> None:
    from envhub_client.tools.top import Top
    from textual.app import App

    async def run() -> None:
        with Watch(hubs, timeout=2.0) as watch:
            app: App[None] = Top(watch)
            async with app.run_test(size=(200, 50)) as pilot:
                await steps(Driven(app, pilot))

    asyncio.run(run())


@pytest.mark.long
def test_operator_sorts_looks_and_ends_a_session_whose_trainer_reads_why(hub: ServedHub) -> None:
    with (
        closing(envhub.make_vec("counter", 1, hub=hub.ipc)) as first,
        closing(envhub.make_vec("naughty", 2, hub=hub.tcp, num_workers=2)) as second,
    ):
        oldest, crashed = (each.token[:8] for each in (first, second))
        first.reset()
        second.reset()
        second.step([3, 0])  # its first worker ends

        async def steps(screen: Driven) -> None:
            await screen.until(lambda: len(screen.column("session")) == 2)
            await screen.press("r")
            assert screen.column("session") == [crashed, oldest]
            await screen.press("a")
            assert screen.column("session") == [oldest, crashed]
            await screen.press("down")
            await screen.until(lambda: screen.app.workers_table.row_count == 2)
            about = str(screen.app.about_text.render())
            assert crashed in about and "naughty" in about and "SIGKILL" in about
            await screen.opens("k")
            assert "envs: [0]" in screen.text() and "Current thread" in screen.text()
            await screen.press("escape", "tab", "down")
            await screen.opens("R")
            await screen.press(*"leaks", "enter")
            await screen.until(lambda: "leaks" in str(screen.app.about_text.render()))
            await screen.opens("e")
            await screen.press("escape")
            assert screen.column("session") == [oldest, crashed]
            await screen.opens("e")
            await screen.press(*"stale", "enter")
            await screen.until(lambda: screen.column("session") == [oldest])
            await screen.opens("x")
            assert f"session: {crashed}" in screen.text() and "why: stale" in screen.text()
            await screen.press("escape", "q")

        drive([hub.ipc], steps)
        with pytest.raises(envhub.SessionLost, match=r"by user .*: stale"):
            second.step([0, 0])
        first.step([0])


@pytest.mark.long
def test_hub_that_is_killed_is_a_row_and_comes_back(tmp_path: Path, hub: ServedHub) -> None:
    port = free_port()
    binds = [f"tcp://127.0.0.1:{port}"]

    async def steps(screen: Driven) -> None:
        def shows(state: str) -> Callable[[], bool]:
            return lambda: dict(zip(screen.column("hub"), screen.column("phase"), strict=True)).get(binds[0]) == state

        with serve(tmp_path, "counter=sims:Counter", binds=binds) as served:
            await screen.until(shows("ok"))
            served.process.kill()
            await screen.until(shows("unreachable"))
        with serve(tmp_path, "counter=sims:Counter", binds=binds):
            await screen.until(shows("ok"))
            assert hub.ipc in screen.column("hub")

    drive([*binds, hub.ipc], steps)
