"""Waiting for hubs as long as they are within reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from envhub.errors import HubTimeout
from envhub_client.connection.connection import Connection
from envhub_client.deadline import Deadline

LOOK_S = 0.25  # between looks at whether a hub is out of reach, or what it does is wanted no more
SILENCE_S_MIN = 2.5  # of a hub that is asked every second

Result = TypeVar("Result")


def while_in_reach(
    connections: Callable[[], Iterable[Connection]],
    silence_s_max: float,
    timeout: float | None,
    wait: Callable[[float | None], Result],
) -> Result:
    """Wait by ``wait`` for at most ``timeout`` seconds, as long as none of these hubs is out of reach.

    Raises:
        HubLost: one is, or has been silent for ``silence_s_max`` seconds.
        Exception: from ``wait``.
    """
    deadline = None if timeout is None else Deadline(timeout)
    while True:
        try:
            return wait(LOOK_S if deadline is None else min(LOOK_S, deadline.left_s()))
        except HubTimeout:
            for connection in connections():
                connection.check_reach(silence_s_max)
            if deadline is not None and not deadline.left_s():
                raise
