"""Output of the ``envhub`` command: the envs of a hub, its sessions, and the hubs of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from envhub.errors import EnvHubError, hidden, printable
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub_client.client import Client, connect
from envhub_client.connection.known_hubs import Member, members
from envhub_client.deadline import Deadline


def print_rows(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, else a line for each row, with tabs between its columns."""
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row).rstrip(), file=console.file)  # rich would put spaces in place of tabs
        return
    if rows:
        table = Table()
        for number, heading in enumerate(headings):
            table.add_column(heading, no_wrap=number == 0, overflow="fold")  # the first is a name to be copied
        for row in rows:
            table.add_row(*map(Text, row))  # no markup
        console.print(table)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def number(value: float | None, unit: float = 1, digits: int = 0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


Cell = Callable[[dict[str, Any]], str]
_SESSION: dict[str, Cell] = {
    "session": lambda row: row["session"],
    "owner": lambda row: " ".join(f"{row['owner'].get(name) or ''}" for name in ("key", "user")).strip() or "-",
    "label": lambda row: row.get("label") or "-",
    "env": lambda row: f"{row['num_envs']} x {row['env']}",
}
SESSION_COLUMNS: dict[str, Cell] = {
    **_SESSION,
    "phase": lambda row: row["phase"],
    "age": lambda row: duration(row.get("age_s")),
    "idle": lambda row: duration(row.get("idle_s")),
    "steps/s": lambda row: number(row.get("steps_per_s")),
    "p99 ms": lambda row: number((row.get("step_ms") or {}).get("p99"), digits=1),
    "CPUs": lambda row: number(row.get("cpu"), digits=1),
    "MiB": lambda row: number(row.get("memory_bytes"), 1 << 20),
    "restarts": lambda row: f"{row['restarts']}",
}
ENDED_COLUMNS: dict[str, Cell] = {
    **_SESSION,
    "ended": lambda row: f"{duration(row['ended_s'])} ago",
    "by": lambda row: row["by"],
    "why": lambda row: row["why"],
    "steps": lambda row: f"{row['steps']}",
}
SLOW_COLUMNS: dict[str, Cell] = {
    "session": lambda row: row["session"],
    "env": lambda row: row["env"],
    "envs": lambda row: ", ".join(map(str, row["envs"])),
    "in": lambda row: row["verb"],
    "ms": lambda row: number(row["ms"]),
    "ended": lambda row: "not yet" if row["ago_s"] is None else f"{duration(row['ago_s'])} ago",
}


def session_cells(columns: dict[str, Cell], row: dict[str, Any]) -> list[str]:
    return [_one_line(hidden(cell(row))) for cell in columns.values()]


SPACES_MAX = 16  # a hub tells the spaces of an env only by making one
ANSWER_MAX_S = 10.0  # a hub answers sooner than it makes some envs
HEADINGS = ("env", "observation space", "action space")


def print_envs(console: Console, errors: Console, address: str | None, patterns: Sequence[str], timeout: float) -> bool:
    """Print the names that a hub offers, with their spaces where they are few; returns whether there are any."""
    with connect(address, min(timeout, ANSWER_MAX_S)) as client:
        offered, unready = client.envs(), client.health()["unready"]
        names = [name for name in offered if any(fnmatchcase(name, pattern) for pattern in patterns or ("*",))]
        for name in sorted(unready.keys() - set(offered)):  # an id or a pattern that names nothing there
            errors.print(hidden(printable(f"unready: {name}: {unready[name]}")), markup=False, soft_wrap=True)
        if len(names) > SPACES_MAX:
            for name in names:
                console.print(name, markup=False, soft_wrap=True)
            text = f"{len(names)} envs; of at most {SPACES_MAX} the spaces are listed, too: name them, or a pattern"
            errors.print(text, markup=False, soft_wrap=True)
            return True
        print_rows(console, HEADINGS, [(name, *_spaces(client, name, timeout)) for name in names])
    if not names:
        text = f"of its {len(offered)} envs none matches {' or '.join(patterns)}" if offered else "it offers no env"
        errors.print(text, markup=False, soft_wrap=True)
    return bool(names)


def _spaces(client: Client, name: str, timeout: float) -> tuple[str, str]:
    try:
        envs = client.make_vec(name, 1, num_workers=1, lane="wire", init_timeout=timeout)
    except Exception as error:  # an env may raise anything
        if not (isinstance(error, EnvHubError) or isinstance(error.__cause__, EnvHubError)):
            raise
        return f"cannot be made: {_one_line(str(error)) or type(error).__name__}", ""
    try:
        return _one_line(str(envs.single_observation_space)), _one_line(str(envs.single_action_space))
    finally:
        envs.close()


def _one_line(text: str) -> str:
    return " ".join(str(printable(text)).partition("\n\n")[0].split())


ASKED_MAX = 64  # hubs that are asked at one time


@dataclass(frozen=True)
class HubReport:
    """State of a hub of a fleet; ``state`` is ``ok``, ``draining`` or ``unreachable``, and all after it None then."""

    name: str
    address: str  # without keys
    state: str = "unreachable"
    why: str = ""  # it does not answer
    host: str | None = None
    sessions: int | None = None
    envs: int | None = None
    envs_free: int | None = None  # that this client could still make
    cpus: int | None = None
    steps_per_s: float | None = None
    losses: int | None = None  # restarts of workers

    @property
    def answers(self) -> bool:
        return self.state != "unreachable"


def reports(hubs: Sequence[str | Secret[str]], timeout: float) -> list[HubReport]:
    """Report all hubs that these names stand for, as of ``members``, in their order, within ``timeout`` seconds."""
    asked = {(each.name, addresses.written(each.address)): each for hub in hubs for each in members(hub)}
    deadline = Deadline(timeout)
    with ThreadPoolExecutor(min(len(asked), ASKED_MAX) or 1) as threads:
        return [*threads.map(partial(_report, deadline), asked.values())]


def _report(deadline: Deadline, hub: Member) -> HubReport:
    report = hub.name, addresses.written(hub.address)
    try:
        with Client(hub.address, max(round(deadline.left_s(), 1), 0.1)) as client:
            stats = client.stats()
            return HubReport(
                *report,
                state=stats["status"],
                host=client.host,
                sessions=stats["sessions"],
                envs=stats["envs"],
                envs_free=stats["capacity"]["envs_free"],
                cpus=stats["capacity"]["cpus"],
                steps_per_s=stats["steps_per_s"],
                losses=stats["restarts"],
            )
    except EnvHubError as error:
        return HubReport(*report, why=str(error))


FLEET_HEADINGS = ("name", "address", "host", "state", "sessions", "envs", "free", "CPUs", "steps/s", "losses")


def fleet_cells(row: HubReport) -> list[str]:
    counts = row.sessions, row.envs, row.envs_free, row.cpus, row.steps_per_s, row.losses
    return [*map(printable, (row.name, row.address, row.host or "-", row.state)), *map(number, counts)]
