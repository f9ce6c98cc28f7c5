"""Reports of the hubs of fleets, which are asked at one time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from envhub.errors import EnvHubError
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub_client.client import Client
from envhub_client.connection import announced_hubs, known_hubs
from envhub_client.deadline import Deadline
from envhub_client.fleet.members import members

ASKED_MAX = 64  # hubs that are asked at one time


@dataclass(frozen=True)
class HubReport:
    """State of a hub of a fleet.

    Attributes:
        name: of the hub.
        address: without keys; empty where it has none for this machine.
        state: ``ok``, ``draining``, ``unreachable`` or ``stale``.
        why: the hub is not reached, or its announcement is stale.
        sessions: that exist.
        envs: that exist.
        losses: how often its workers were restarted.
    """

    name: str
    address: str
    state: str
    why: str = ""
    sessions: int | None = None
    envs: int | None = None
    losses: int | None = None

    @property
    def answers(self) -> bool:
        """True if the hub has answered."""
        return self.state not in ("unreachable", "stale")


@dataclass(frozen=True)
class AskedHub:
    """A hub to ask, or the reason why it cannot be."""

    name: str
    address: str | Secret[str]
    why: str = ""
    is_stale: bool = False


def reports(hubs: Sequence[str], timeout: float) -> list[HubReport]:
    """Report all hubs that these addresses and names stand for, in their order; each is asked once.

    Args:
        hubs: in any of the forms of ``members``.
        timeout: the seconds for all of them together.

    Raises:
        EnvHubError: a name stands for no hub; as of ``members``.
    """
    deadline = Deadline(timeout)
    places = {(each.name, addresses.written(each.address)): each for hub in hubs for each in _places(hub)}
    with ThreadPoolExecutor(min(len(places), ASKED_MAX) or 1) as threads:
        return [*threads.map(partial(_report, deadline), places.values())]


def _places(hub: str) -> list[AskedHub]:
    folder = announced_hubs.folder_of(hub)
    if folder is None:
        return [AskedHub(*member) for member in members(hub)]
    present, skipped = announced_hubs.announced(folder)
    places = []
    for each in present:
        try:
            places.append(AskedHub(each.name, known_hubs.announced_address(each, folder)))
        except EnvHubError as error:
            places.append(AskedHub(each.name, "", str(error)))
    for file in skipped:
        name = file.stale.name if file.stale is not None else file.file
        places.append(AskedHub(name, "", file.why, is_stale=file.stale is not None))
    return places


def _report(deadline: Deadline, place: AskedHub) -> HubReport:
    written = addresses.written(place.address)
    if place.why:
        return HubReport(place.name, written, "stale" if place.is_stale else "unreachable", place.why)
    try:
        with Client(place.address, max(deadline.left_s(), 0.01)) as client:
            health, counters = client.health(), client.stats()
    except EnvHubError as error:
        return HubReport(place.name, written, "unreachable", str(error))
    return HubReport(
        place.name,
        written,
        str(health["status"]),
        sessions=health["sessions"],
        envs=int(counters["envs"]),
        losses=int(counters["restarts"]),
    )
