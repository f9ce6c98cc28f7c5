"""Reports of the hubs of fleets, which are asked at one time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from envhub.errors import EnvHubError, printable
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub_client.client import Client
from envhub_client.deadline import Deadline
from envhub_client.fleet.members import Member, members

ASKED_MAX = 64  # hubs that are asked at one time
RATE_S = 0.5  # between two counts of steps, which give a rate


@dataclass(frozen=True)
class HubReport:
    """State of a hub of a fleet; None for what it does not say.

    Attributes:
        name: of the hub.
        address: without keys.
        host: the name of its machine; empty where it is not known.
        state: ``ok``, ``draining`` or ``unreachable``.
        why: the reason why it does not answer.
        sessions: that exist.
        envs: that exist.
        envs_free: that this client could still make.
        cpus: that the hub and its workers may use.
        steps_per_s: steps and resets of all envs.
        losses: how often workers ended and were restarted.
    """

    name: str
    address: str
    host: str
    state: str
    why: str = ""
    sessions: int | None = None
    envs: int | None = None
    envs_free: int | None = None
    cpus: int | None = None
    steps_per_s: float | None = None
    losses: int | None = None

    @property
    def answers(self) -> bool:
        """True if the hub has answered."""
        return self.state != "unreachable"


def reports(hubs: Sequence[str | Secret[str]], timeout: float) -> list[HubReport]:
    """Report all hubs that these addresses and names stand for, in their order; each is asked once.

    Args:
        hubs: in any of the forms of ``members``.
        timeout: the seconds for all of them together.

    Raises:
        EnvHubError: a name stands for no hub; as of ``members``.
    """
    asked = {(each.name, addresses.written(each.address)): each for hub in hubs for each in members(hub)}
    deadline = Deadline(timeout)
    with ThreadPoolExecutor(min(len(asked), ASKED_MAX) or 1) as threads:
        return [*threads.map(partial(_report, deadline), asked.values())]


def _report(deadline: Deadline, hub: Member) -> HubReport:
    try:
        with Client(hub.address, _left_s(deadline)) as client:
            return _answer(client, deadline, hub)
    except EnvHubError as error:
        return HubReport(hub.name, addresses.written(hub.address), "", "unreachable", str(error))


def _left_s(deadline: Deadline) -> float:
    return max(round(deadline.left_s(), 1), 0.1)


def _answer(client: Client, deadline: Deadline, hub: Member) -> HubReport:
    client.timeout = _left_s(deadline)
    health = client.health()
    client.timeout = _left_s(deadline)
    steps_before, began_s = _number(client.stats(), "steps"), time.monotonic()
    time.sleep(min(RATE_S, deadline.left_s() / 2))
    client.timeout = _left_s(deadline)
    counters, seconds = client.stats(), time.monotonic() - began_s
    steps = _number(counters, "steps")
    capacity = counters.get("capacity")
    capacity = capacity if isinstance(capacity, Mapping) else {}
    return HubReport(
        hub.name,
        addresses.written(hub.address),
        client.host,
        str(health["status"]),
        sessions=_number(health, "sessions"),
        envs=_number(counters, "envs"),
        envs_free=_number(capacity, "envs_free"),
        cpus=_number(capacity, "cpus"),
        steps_per_s=None if steps is None or steps_before is None else (steps - steps_before) / seconds,
        losses=_number(counters, "restarts"),
    )


def _number(values: Mapping[str, Any], name: str) -> int | None:
    """The whole number of this name; None where an older hub has none."""
    value = values.get(name)
    return value if isinstance(value, int) else None


def table(rows: Sequence[HubReport]) -> list[str]:
    """The reports as the lines of a table; a dash for what a hub does not say."""
    titles = "name", "address", "host", "state", "sessions", "envs", "free", "CPUs", "steps/s", "losses"
    lines = [titles, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _cells(row: HubReport) -> tuple[str, ...]:
    rate = None if row.steps_per_s is None else round(row.steps_per_s)
    numbers = row.sessions, row.envs, row.envs_free, row.cpus, rate, row.losses
    texts = row.name, row.address or "-", row.host or "-", row.state
    return *map(printable, texts), *("-" if each is None else f"{each}" for each in numbers)
