"""The orders to keep a replay of an env that failed."""

from __future__ import annotations

from dataclasses import replace

from envhub.env_failure import EnvFailure
from envhub_server.ipc.replay_file import name_of_raised
from envhub_server.session.effects import Effects, ReplayOrder
from envhub_server.session.launcher import Launcher
from envhub_server.session.slots import Slot


class ReplayOrders:
    """Orders the replays of one session, if any are kept."""

    def __init__(self, launcher: Launcher, effects: Effects) -> None:
        self._launcher, self._effects = launcher, effects

    @property
    def prefix(self) -> str:
        """The prefix of the names of the session's replays; empty if none are kept."""
        return self._launcher.rules.replays

    def of_env(self, slot: Slot, row: int | None, request: int, trace: bytes, failure: EnvFailure) -> str:
        """Order a replay of this row's env up to its exception in this request, if its worker sent a trace.

        Returns:
            The name of the replay, or an empty one.
        """
        if not (trace and self.prefix and row in slot.rows and slot.process is not None):
            return ""
        named = replace(failure, replay=name_of_raised(self.prefix, row or 0, request))
        self.keep(slot, slot.process.number, named, row, trace)
        return named.replay

    def keep(self, slot: Slot, process: int, failure: EnvFailure, row: int | None = None, trace: bytes = b"") -> None:
        """Order a replay, if the failure names one; see ``ReplayOrder``."""
        if failure.replay:
            launcher, limit = self._launcher, self._launcher.rules.hosting.memory_max
            assert launcher.arena is not None
            order = launcher.order(slot)
            kept = ReplayOrder(slot.index, process, row, trace, failure, order, launcher.arena, limit)
            self._effects.keep_replay(kept)
