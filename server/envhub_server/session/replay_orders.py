"""The orders to keep a replay of an env that failed."""

from __future__ import annotations

from dataclasses import replace

from envhub.env_failure import EnvFailure
from envhub_server.ipc.replay_file import name_of_raised
from envhub_server.session import instructions as do
from envhub_server.session.instructions import Instructions
from envhub_server.session.launcher import Launcher
from envhub_server.session.slots import Slot


class ReplayOrders:
    """Orders the replays of one session, if any are kept."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    @property
    def prefix(self) -> str:
        """The prefix of the names of the session's replays; empty if none are kept."""
        return self._launcher.rules.replays

    def of_env(self, slot: Slot, row: int | None, request: int, trace: bytes, failure: EnvFailure) -> Instructions:
        """Order a replay of this row's env up to its exception in this request, if its worker sent a trace."""
        if not (trace and self.prefix and row in slot.rows and slot.process is not None):
            return []
        named = replace(failure, replay=name_of_raised(self.prefix, row or 0, request))
        return self.keep(slot, slot.process.number, named, row, trace)

    def keep(
        self, slot: Slot, process: int, failure: EnvFailure, row: int | None = None, trace: bytes = b""
    ) -> Instructions:
        """Order a replay, if the failure names one; see ``KeepReplay``."""
        launcher, limit = self._launcher, self._launcher.rules.hosting.memory_max
        assert launcher.arena is not None
        kept = do.KeepReplay(slot.index, process, row, trace, failure, launcher.order(slot), launcher.arena, limit)
        return [kept] if failure.replay else []
