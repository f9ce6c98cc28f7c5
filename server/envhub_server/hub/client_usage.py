"""Usage of a hub by each client, next to what its key allows."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from envhub_server.hub.directory import Directory
from envhub_server.hub.planner import Usage
from envhub_server.memory.session_memory import ArenaBudget
from envhub_server.network.rights import Holder

MINUTE_S = 60.0


class ClientUsage:
    """Usage by each client that has quotas; the hub's own user has none.

    It owns the budgets of shared memory, and the times of the last MAKEs.
    """

    def __init__(self, budget: ArenaBudget, directory: Directory) -> None:
        """Count the sessions of ``directory``, within this budget of shared memory of all clients."""
        self._budget, self._directory = budget, directory
        self._budgets: dict[str, ArenaBudget] = {}
        self._made_s: dict[str, deque[float]] = {}  # the times of the last MAKEs and ATTACHes

    def budget(self, holder: Holder) -> ArenaBudget:
        """The shared memory that the client may use."""
        if holder.quotas is None:
            return self._budget
        budget = self._budgets.setdefault(holder.name, ArenaBudget(0, self._budget))
        budget.bytes_max = holder.quotas.arena_bytes_max  # which may have changed
        return budget

    def count_make(self, holder: Holder, now_s: float) -> str:
        """Note a MAKE or ATTACH of the client, with any outcome; returns why it is one too many, or an empty text.

        An ATTACH counts because it gives the session another token, and each token has lines of its own in the log.
        """
        if holder.quotas is None:
            return ""
        times = self._made_s.setdefault(holder.name, deque())
        while times and times[0] <= now_s - MINUTE_S:
            times.popleft()
        if why := holder.over_quota("makes_per_minute", len(times), 1, holder.quotas.makes_per_minute_max):
            return why
        times.append(now_s)
        return ""

    def of(self, holder: Holder) -> Usage:
        """Amounts in use when this client asks for a session."""
        states = [each.state for each in self._directory.sessions]
        of_hub = Usage(
            hub_sessions=len(states),
            hub_envs=sum(each.make.num_envs for each in states),
            busy_workers=sum(len(each.slots) for each in states),
        )
        if holder.quotas is None:
            return of_hub
        states = [each.state for each in self._directory.sessions if each.owner == holder.name]
        return replace(
            of_hub,
            sessions=len(states),
            envs=sum(each.make.num_envs for each in states),
            processes=sum(each.processes for each in states),
        )
