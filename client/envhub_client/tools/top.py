"""``envhub top`` on a terminal: sessions of several hubs, live, with ways to look deeper and to act. Needs Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from envhub.errors import EnvHubError, printable
from envhub_client.client import Client
from envhub_client.tools.console import session_cells
from envhub_client.tools.watch import HEADINGS, SORTS, TURN_S, WORKER_COLUMNS, Watch, described


class Box(ModalScreen[str | None]):
    """A text to read, or a question before something is done: Enter does it, for the reason that is typed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Back")]

    def __init__(self, text: str, asks: bool = False) -> None:
        super().__init__()
        self._text, self._asks = text, asks

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=not self._asks):
            yield Static(self._text, id="text", markup=False)
            if self._asks:
                yield Input(placeholder="why; Enter does it, Escape does not")
        yield Footer()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class Top(App[None]):
    """The table of all sessions, and below it the workers of the chosen one."""

    TITLE = "envhub top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Box { align: center middle; }
    VerticalScroll { border: round $accent; padding: 0 1; margin: 2 4; height: auto; max-height: 90%; }
    #sessions { height: 2fr; }
    #workers { height: 1fr; }
    #about { height: auto; max-height: 40%; border-top: solid $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"sort('{name}')", f"by {name}") for name, (key, _) in SORTS.items()),
        Binding("e", "end", "End"),
        Binding("k", "stack", "Stack"),
        Binding("R", "restart", "Restart worker"),
        Binding("l", "slow", "Slow steps"),
        Binding("x", "ended", "Ended"),
        Binding("D", "drain", "Drain hub"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch, self._sort = watch, "trouble"
        self.hubs_text, self.about_text = Static(markup=False), Static(id="about", markup=False)
        self.sessions_table = DataTable[Text](id="sessions", cursor_type="row")
        self.workers_table = DataTable[Text](id="workers", cursor_type="row")

    def compose(self) -> ComposeResult:
        yield from (self.hubs_text, self.sessions_table, self.about_text, self.workers_table, Footer())

    def on_mount(self) -> None:
        self.sessions_table.add_columns(*HEADINGS)
        self.workers_table.add_columns(*WORKER_COLUMNS)
        self.set_interval(TURN_S, self.update)

    def update(self) -> None:
        self._watch.update()
        states = (
            f"{each.name}: {each.state}{': ' * bool(each.why)}{each.why}, {len(each.sessions)} sessions"
            for each in self._watch.states.values()
        )
        self.hubs_text.update("\n".join([*states, f"by {self._sort}; Tab goes to the workers of a session"]))
        rows = [(f"{cells[0]} {cells[1]}", cells) for cells in self._watch.table(self._sort)]
        fill(self.sessions_table, rows, HEADINGS.index("trouble"))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the chosen session, also if it has new values only."""
        if event.data_table is self.sessions_table:
            _, session = self.place()
            row = next((each for each in self._watch.sessions() if each["session"] == session), None)
            self.about_text.update(self._watch.about(row) if row else "")
            processes = [each for each in row["processes"] if each["envs"]] if row else []
            rows = [(str(each["envs"][0]), session_cells(WORKER_COLUMNS, each)) for each in processes]
            fill(self.workers_table, rows)

    def place(self) -> tuple[str, str]:
        """Hub and name of the chosen session; the name is empty for a hub without sessions."""
        hub, _, session = chosen(self.sessions_table).rpartition(" ")
        return hub, session

    def action_sort(self, name: str) -> None:
        self._sort = name
        self.update()

    @work
    async def act(self, call: Callable[[Client, str], Any], question: str = "") -> None:
        """Have the chosen hub do this, for the reason that answers the question; then show its rows, or say so."""
        hub, _ = self.place()
        why = await self.push_screen_wait(Box(question, asks=True)) if question else ""
        if not hub or why is None:
            return
        try:
            rows = await asyncio.to_thread(self._watch.ask, hub, lambda client: call(client, why))
        except EnvHubError as error:
            self.notify(printable(str(error)), severity="error", markup=False)
            return
        if question:
            self.notify(f"done: {question}", markup=False)
        else:
            self.push_screen(Box("\n\n".join(map(described, rows)) or "none"))

    def action_end(self) -> None:
        hub, session = self.place()
        if session:
            self.act(lambda client, why: client.end(session, why), f"end session {session} of {hub}")

    def action_restart(self) -> None:
        (_, session), env = self.place(), self.env()
        if env is not None:
            question = f"restart the worker of env {env} of session {session}"
            self.act(lambda client, why: client.restart(session, env, why), question)

    def action_drain(self) -> None:
        question = f"drain {self.place()[0]}: it makes no sessions any more, and ends when those it has have ended"
        self.act(lambda client, why: client.drain(message=why), question)

    def action_stack(self) -> None:
        (_, session), env = self.place(), self.env()
        self.act(lambda client, _: client.stack(session, env))

    def action_slow(self) -> None:
        self.act(lambda client, _: client.slow())

    def action_ended(self) -> None:
        self.act(lambda client, _: client.sessions(ended=True))

    def env(self) -> int | None:
        env = chosen(self.workers_table)
        return int(env) if env else None


def fill(table: DataTable[Text], rows: Sequence[tuple[str, Sequence[str]]], trouble: int = -1) -> None:
    """Put rows into a table in place of its own, with the cursor on the same key; red if that column has a text."""
    key, place = chosen(table), table.cursor_row
    table.clear()
    for name, cells in rows:
        table.add_row(*(Text(cell, "bold red" if trouble >= 0 and cells[trouble] else "") for cell in cells), key=name)
    table.move_cursor(row=table.get_row_index(key) if key in table.rows else place)


def chosen(table: DataTable[Text]) -> str:
    if not table.is_valid_row_index(table.cursor_row):
        return ""
    return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value or ""
