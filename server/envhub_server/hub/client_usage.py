"""Usage of a hub by each client, next to what its key allows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable
from operator import itemgetter

from envhub.protocol.messages import Make
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.memory.session_memory import ArenaBudget
from envhub_server.network.rights import Holder
from envhub_server.session.failure_text import Overrun

MINUTE_S = 60.0


class ClientUsage:
    """The sessions, memory and MAKEs of each client that has quotas; the hub's own user has none."""

    def __init__(self, budget: ArenaBudget) -> None:
        """Within this budget of shared memory of all clients."""
        self._budget = budget
        self._budgets: dict[str, ArenaBudget] = {}
        # Of each client the bytes that its workers had when they were last measured, and how many they may have.
        self._memory: dict[str, tuple[int, int]] = {}
        self._made_s: dict[str, deque[float]] = {}  # the times of the last MAKEs and ATTACHes

    def budget(self, holder: Holder) -> ArenaBudget:
        """The shared memory that the client may use."""
        if holder.quotas is None:
            return self._budget
        found = self._budgets.setdefault(holder.name, ArenaBudget(0, self._budget))
        found.bytes_max = holder.quotas.arena_bytes_max  # which may have changed
        return found

    def count_make(self, holder: Holder, now_s: float) -> str:
        """Note a MAKE or ATTACH of the client, whatever comes of it; why it is one too many, or empty.

        An ATTACH counts because it gives the session another token, and each token has lines of its own in log and
        audit file.
        """
        if holder.quotas is None:
            return ""
        times = self._made_s.setdefault(holder.name, deque())
        while times and times[0] <= now_s - MINUTE_S:
            times.popleft()
        if why := _beyond(holder, "makes_per_minute", len(times), 1, holder.quotas.makes_per_minute_max):
            return why
        times.append(now_s)
        return ""

    def refusal(self, holder: Holder, make: Make, spares: int, sessions: Iterable[SessionRuntime]) -> str:
        """The reason why the client may not make this session of so many spares next to its others; empty if it may."""
        quotas = holder.quotas
        if quotas is None:
            return ""
        workers = min(make.num_workers or 1, make.num_envs) + spares
        states = [each.state for each in sessions if each.owner == holder.name]
        if why := self.memory_lack(holder.name):
            return why
        return (
            _beyond(holder, "sessions", len(states), 1, quotas.sessions_max)
            or _beyond(holder, "envs", sum(each.make.num_envs for each in states), make.num_envs, quotas.envs_max)
            or _beyond(holder, "workers", sum(each.processes for each in states), workers, quotas.workers_max)
        )

    def overruns(
        self, name: str, bytes_max: int, sessions: Iterable[SessionRuntime]
    ) -> list[tuple[SessionRuntime, int, Overrun]]:
        """Measure the workers of a client, of these sessions; returns those to end so that the others have no more.

        The largest are ended first. What a worker has of its zygote does not count, for all have that in common.
        """
        found = [(nbytes, each, worker) for each in sessions for worker, nbytes in each.memory.items()]
        total = left = sum(nbytes for nbytes, _, _ in found)
        self._memory[name] = total, bytes_max
        ended = []
        for nbytes, runtime, worker in sorted(found, key=itemgetter(0), reverse=True):
            if left <= bytes_max:
                break
            left -= nbytes
            ended.append((runtime, worker, Overrun(nbytes, bytes_max, name, total)))
        return ended

    def memory_lack(self, name: str) -> str:
        """The reason why the client may have no more memory in its workers; empty if it may, or without a sample."""
        has, bytes_max = self._memory.get(name, (0, 0))
        if has <= bytes_max:
            return ""
        return f"the workers of {name} have {has} bytes of memory, of worker_memory_bytes_max={bytes_max} of its key"

    def forget_memory(self, names: Container[str]) -> None:
        """Forget what was measured of all clients but these, which have sessions."""
        self._memory = {name: found for name, found in self._memory.items() if name in names}

    def workers_left(self, holder: Holder, spares: int, sessions: Iterable[SessionRuntime]) -> float:
        """Number of workers a new session of the client may have besides its spares; infinity without quotas."""
        if holder.quotas is None:
            return math.inf
        has = sum(each.state.processes for each in sessions if each.owner == holder.name)
        return holder.quotas.workers_max - has - spares


def _beyond(holder: Holder, name: str, has: int, wants: int, limit: int) -> str:
    if has + wants <= limit:
        return ""
    return f"{holder.name} has {has} and wants {wants} more, of {name}_max={limit} of its key"
