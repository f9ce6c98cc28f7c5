"""The orders to keep a replay of an env that failed."""

from __future__ import annotations

from dataclasses import replace

from envhub.env_failure import EnvFailure
from envhub_server.ipc.journal import name_of_raised
from envhub_server.session import instructions as do
from envhub_server.session.instructions import Instructions
from envhub_server.session.launcher import Launcher
from envhub_server.session.slots import Slot


class ReplayOrders:
    """Orders the replays of one session, if any are kept."""

    def __init__(self, launcher: Launcher, is_vector: bool) -> None:
        self._launcher, self._is_vector = launcher, is_vector

    @property
    def prefix(self) -> str:
        """The prefix of the names of the session's replays; empty if none are kept."""
        return self._launcher.rules.replays

    def of_process(self, slot: Slot, number: int, failure: EnvFailure) -> Instructions:
        """Order a replay of the env that an ended process ran, if the failure names a replay."""
        return self._keep(slot, number, None, -1, failure) if failure.replay else []

    def of_env(self, slot: Slot, row: int, request: int, tick: int, failure: EnvFailure) -> Instructions:
        """Order a replay of this row's env up to its exception in this request."""
        if tick < 0 or not self.prefix or row not in slot.rows or slot.process is None:
            return []
        if self._is_vector and row != slot.rows[0]:  # one replay has all envs of a vector env
            return []
        failure = replace(failure, replay=name_of_raised(self.prefix, row, request))
        return self._keep(slot, slot.process.number, row, tick, failure)

    def _keep(self, slot: Slot, number: int, row: int | None, tick: int, failure: EnvFailure) -> Instructions:
        launcher = self._launcher
        assert launcher.arena is not None
        limit = launcher.rules.hosting.memory_max
        return [do.KeepReplay(slot.index, number, row, tick, failure, launcher.order(slot), launcher.arena, limit)]
