"""States of the hubs of a fleet, which are asked at one time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from envhub.errors import EnvHubError, printable
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub_client.client import Client
from envhub_client.connection.members import Member, members
from envhub_client.deadline import Deadline

ASKED_MAX = 64  # hubs that are asked at one time
RATE_S = 0.5  # between two counts of steps, which give a rate


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
        """True if the hub has answered."""
        return self.state != "unreachable"


def reports(hubs: Sequence[str | Secret[str]], timeout: float) -> list[HubReport]:
    """Report all hubs that these names stand for, as of ``members``, in their order, within ``timeout`` seconds.

    Raises:
        EnvHubError: a name stands for no hub; as of ``members``.
    """
    asked = {(each.name, addresses.written(each.address)): each for hub in hubs for each in members(hub)}
    deadline = Deadline(timeout)
    with ThreadPoolExecutor(min(len(asked), ASKED_MAX) or 1) as threads:
        return [*threads.map(partial(_report, deadline), asked.values())]


def _report(deadline: Deadline, hub: Member) -> HubReport:
    shown = hub.name, addresses.written(hub.address)
    try:
        with Client(hub.address, _left_s(deadline)) as client:
            return _answer(client, deadline, *shown)
    except EnvHubError as error:
        return HubReport(*shown, why=str(error))


def _left_s(deadline: Deadline) -> float:
    return max(round(deadline.left_s(), 1), 0.1)


def _answer(client: Client, deadline: Deadline, name: str, address: str) -> HubReport:
    before, began_s = client.stats(), time.monotonic()
    time.sleep(min(RATE_S, deadline.left_s() / 2))
    client.timeout = _left_s(deadline)
    counters, rate_s = client.stats(), time.monotonic() - began_s
    client.timeout = _left_s(deadline)
    health, capacity = client.health(), counters["capacity"]
    return HubReport(
        name,
        address,
        health["status"],
        host=client.host,
        sessions=health["sessions"],
        envs=counters["envs"],
        envs_free=capacity["envs_free"],
        cpus=capacity["cpus"],
        steps_per_s=(counters["steps"] - before["steps"]) / rate_s,
        losses=counters["restarts"],
    )


def table(rows: Sequence[HubReport]) -> list[str]:
    """The reports as the lines of a table; a dash for what a hub does not say."""
    titles = "name", "address", "host", "state", "sessions", "envs", "free", "CPUs", "steps/s", "losses"
    lines = [titles, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _cells(row: HubReport) -> tuple[str, ...]:
    rate = None if row.steps_per_s is None else round(row.steps_per_s)
    numbers = row.sessions, row.envs, row.envs_free, row.cpus, rate, row.losses
    texts = row.name, row.address, row.host or "-", row.state
    return *map(printable, texts), *("-" if each is None else f"{each}" for each in numbers)
