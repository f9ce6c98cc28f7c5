"""Several hubs and their sessions as they are now, for ``envhub top``: asked again and again, and as texts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from envhub.diagnosis import STUCK_S, Finding, Memory, Row, findings, remember
from envhub.errors import EnvHubError, printable
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub_client.client import Client, connect
from envhub_client.connection.known_hubs import Member, members
from envhub_client.deadline import Deadline
from envhub_client.tools.console import SESSION_COLUMNS, Cell, duration, number, session_cells

TURN_S = 1.0  # a hub looks at its sessions at most once a second
FIND_S = 30.0  # a fleet on Ray is looked up by a process of its own
COLUMNS: dict[str, Cell] = {
    "hub": lambda row: row["hub"],
    "session": SESSION_COLUMNS["session"],
    "trouble": lambda row: row["trouble"],
    **SESSION_COLUMNS,
    "env p99 ms": lambda row: number(row["env_ms"]["p99"], digits=1),
    "lane": lambda row: row["lane"],
}
HEADINGS = (*COLUMNS,)
WORKER_COLUMNS: dict[str, Cell] = {
    "worker": lambda process: str(process["worker"]),
    "pid": lambda process: str(process["pid"] or "-"),
    "envs": lambda process: ", ".join(map(str, process["envs"])),
    "executes": lambda process: process["doing"] + ("" if process["env"] is None else f" of env {process['env']}"),
    "since": lambda process: duration(process["since_s"]),
    **{heading: COLUMNS[heading] for heading in ("CPUs", "MiB", "env p99 ms", "restarts")},
}
# The columns by which sessions are sorted, the largest first, with their keys on the keyboard.
SORTS: dict[str, tuple[str, Callable[[Row], Any]]] = {
    "CPUs": ("c", lambda row: row["cpu"]),
    "MiB": ("m", lambda row: row["memory_bytes"]),
    "steps/s": ("s", lambda row: row["steps_per_s"]),
    "p99 ms": ("p", lambda row: row["step_ms"]["p99"]),
    "restarts": ("r", lambda row: row["restarts"]),
    "age": ("a", lambda row: row["age_s"]),
    "trouble": ("t", lambda row: bool(row["trouble"])),
}


@dataclass(frozen=True)
class HubState:
    """A hub at one time; ``state`` is ``ok``, ``draining`` or ``unreachable``, and then ``why``."""

    name: str
    state: str = "unreachable"
    why: str = ""
    sessions: Sequence[Row] = ()


class Watch(AbstractContextManager["Watch"]):
    """The hubs that names stand for, each asked once a second by a thread of its own, and what is wrong there.

    Attributes:
        states: the last of each hub, and of each name that stands for no hub. ``update`` takes them over.
        findings: the trouble of all sessions.
    """

    def __init__(self, names: Sequence[str | Secret[str]], timeout: float, stuck_s: float = STUCK_S) -> None:
        """Begin to watch; an empty name is the hub of this machine."""
        self._names, self._timeout, self._stuck_s = names, timeout, stuck_s
        self._addresses: dict[str, str | Secret[str]] = {}
        self._answers: dict[str, HubState] = {}  # written by the threads
        self._closed = threading.Event()
        self._memory: Memory = {}
        self.states: dict[str, HubState] = {}
        self.findings: list[Finding] = []
        self._start(self._find)

    def _start(self, target: Callable[..., None], *args: str) -> None:
        # A daemon, so that the end of a program does not wait for a hub that does not answer.
        threading.Thread(target=target, args=args, daemon=True).start()

    def _find(self) -> None:
        """Look up the names, of which some stand for other hubs than before."""
        while not self._closed.is_set():
            for name in self._names:
                written = printable(addresses.written(name))
                try:
                    hubs = members(name) if name else (Member("this machine", ""),)
                except EnvHubError as error:
                    self._answers[written] = HubState(written, why=printable(str(error)))
                    continue
                if written not in self._addresses:
                    self._answers.pop(written, None)
                for hub in hubs:
                    is_new = hub.name not in self._addresses
                    self._addresses[hub.name] = hub.address
                    if is_new:
                        self._start(self._ask_again, hub.name)
            self._closed.wait(FIND_S)

    def _ask_again(self, name: str) -> None:
        while not self._closed.is_set():
            try:
                with connect(self._addresses[name], self._timeout) as client:
                    while not self._closed.is_set():
                        state = client.health()["status"]
                        self._answers[name] = HubState(name, state, "", printable(client.sessions()))
                        self._closed.wait(TURN_S)
            except EnvHubError as error:
                self._answers[name] = HubState(name, why=printable(str(error)))
                self._closed.wait(TURN_S)

    def update(self) -> None:
        """Take over the last answers of all hubs."""
        answers = self._answers.copy()
        names = dict.fromkeys([*self._addresses, *answers])
        self.states = {name: answers.get(name, HubState(name, why="it has not answered yet")) for name in names}
        rows = self.sessions()
        self._memory = remember(self._memory, rows)
        self.findings = findings(rows, self._memory, self._stuck_s)

    def look(self, seconds: float) -> None:
        """Update for so long, as a leak shows only over time."""
        deadline = Deadline(seconds)
        while left_s := deadline.left_s():
            time.sleep(min(TURN_S, left_s))
            self.update()

    def ask(self, hub: str, call: Callable[[Client], Any]) -> Any:
        """Return what this gives of a client of its own, in any thread."""
        with connect(self._addresses[hub], self._timeout) as client:
            return call(client)

    def __exit__(self, *exc_info: object) -> None:
        self._closed.set()

    def troubles(self, session: str) -> list[Finding]:
        return [each for each in self.findings if each.session == session]

    def sessions(self) -> list[dict[str, Any]]:
        return [{"hub": state.name, **row} for state in self.states.values() for row in state.sessions]

    def report(self) -> dict[str, Any]:
        hubs = [{"name": each.name, "state": each.state, "why": each.why} for each in self.states.values()]
        return {"hubs": hubs, "sessions": self.sessions(), "findings": self.findings}

    def table(self, sort: str = "trouble") -> list[list[str]]:
        """Cells of each session, the largest first by a column; then of hubs without any."""
        rows = self.sessions()
        for row in rows:
            row["trouble"] = ", ".join(dict.fromkeys(each.trouble for each in self.troubles(row["session"])))
        rows.sort(key=lambda row: SORTS[sort][1](row) or 0, reverse=True)
        cells = [session_cells(COLUMNS, row) for row in rows]
        for state in self.states.values():
            if not state.sessions:
                row = {"hub": state.name, "phase": state.state, "trouble": state.state if state.state != "ok" else ""}
                cells.append([row.get(heading, "") for heading in HEADINGS])
        return cells

    def about(self, row: Row) -> str:
        """Describe a session: its owner and envs, its trouble, and why its workers were restarted."""
        names = "key", "user", "host", "pid", "program"
        owner = ", ".join(f"{name} {row['owner'][name]}" for name in names if row["owner"].get(name))
        text = f"{row['session']} {row['label']} of {owner}: {row['num_envs']} of {row['env']} {row['kwargs']}, "
        lines = [f"{text}{row['steps']} steps", *map(str, self.troubles(row["session"]))]
        for each in row["reasons"][:-5:-1]:
            lines.append(f"{duration(each['ago_s'])} ago: worker {each['worker']}: {each['why']}")
        return "\n".join(lines)


def described(row: Row) -> str:
    """Lines of text, each with the name of a field and its value, without those that have none."""
    return "\n".join(f"{name}: {value}" for name, value in printable(row).items() if value not in (None, "", [], {}))
