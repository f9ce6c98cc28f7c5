"""Interface of the features that observe a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envhub.arena.layout import Layout
from envhub_server.ipc import control
from envhub_server.log import Logger
from envhub_server.memory.session_memory import SessionMemory
from envhub_server.session.effects import ReplayOrder


@dataclass(frozen=True)
class Recipient:
    """A process that is given an arena.

    Attributes:
        process: its number.
        slot: the index of the slot that it serves, or is to.
        rows: of that slot.
        layout: of the arena.
        log: the session's.
    """

    process: int
    slot: int
    rows: Sequence[int]
    layout: Layout
    log: Logger


class SessionObserver:
    """One feature of one session, such as its replays; what it does not define does nothing.

    A process is named by its number, which no other process of the session ever has.
    """

    def worker_built(self, process: int, built: control.Built) -> None:
        """Note that a process has made its envs."""

    def arena_given(
        self, recipient: Recipient, message: control.MapArena
    ) -> tuple[control.MapArena, Mapping[str, int]]:
        """Add to what a process is told with the arena, also with each later one.

        Returns:
            The message, and descriptors to send with it, by their names in ``ArenaDescriptors``. The caller closes
            them.
        """
        return message, {}

    def env_failed(self, wanted: ReplayOrder, rows: Sequence[int], memory: SessionMemory) -> None:
        """Note that an env has failed, of a process with these rows."""

    def rows_lost(self, process: int, why: str) -> None:
        """Note that the process of a slot has ended, and the hub completes its rows."""

    def process_ended(self, process: int, why: str) -> None:
        """Note that a process has ended; ``why`` is empty where that was expected."""

    def session_ended(self) -> None:
        """Note that the session is over; only ``process_ended`` of the process that ended it comes afterwards."""
