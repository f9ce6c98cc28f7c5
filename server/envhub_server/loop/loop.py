"""The facilities that all parts of a hub's loop have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from envhub_server.loop.clock import Clock
from envhub_server.loop.poller import Poller
from envhub_server.loop.schedule import Schedule


@dataclass(frozen=True)
class Loop:
    """One loop's clock, the functions that it calls at their times, and the descriptors that it waits for."""

    clock: Clock
    schedule: Schedule
    poller: Poller = field(default_factory=Poller)
