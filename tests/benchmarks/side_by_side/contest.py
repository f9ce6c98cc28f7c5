"""A contest that measures memory and CPUs, too, and in which other packages and raw pyzmq can take part."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import gymnasium

from envhub.arena.layout import RESULT_BYTES
from envhub.values import spaces
from side_by_side.echo import echo, one_way
from side_by_side.entrant import PROCESSES_MAX, Contest, Entrant, Summary, Task
from side_by_side.resources import Memory, added_mb, cpu_seconds_of_others, memory
from side_by_side.rivals import CannotHost, Rival, SpinningEntrant

ECHO, ONE_WAY = "pyzmq echo", "pyzmq one-way"


@dataclass(frozen=True)
class Measurement:
    """Measurements of one way.

    Attributes:
        num_envs: the number of envs.
        processes: the number of processes that the envs are in; 0 is this one, None where there are no envs.
        summary: the times.
        cores: the number of CPUs that this program and all that it started kept busy meanwhile.
        memory_mb: megabytes (PSS) that the way added, after its first steps.
    """

    num_envs: int
    processes: int | None
    summary: Summary
    cores: float
    memory_mb: float


class MeasuredContest(Contest):
    """Ways to step the envs of a task; use it in ``with``, add the ways, then ``measure`` them.

    Attributes:
        failures: by name of a rival, why it is not among the ways though it is installed.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.failures: dict[str, str] = {}
        self._task = task
        self._memory: Memory | None = None  # after the last way was added
        self._memory_mb: dict[str, float] = {}

    def add(
        self, way: str, entrant: AbstractContextManager[Entrant], hub_pid: Callable[[], int | None] = lambda: None
    ) -> None:
        """Make a way ready, and see what memory that took; ``hub_pid`` is asked thereafter."""
        gc.collect()  # beforehand only: it writes to what forked processes share with this one, which unshares it
        before = memory(self._memory)
        super().add(way, entrant)
        self._memory = memory()
        self._memory_mb[way] = added_mb(before, self._memory, hub_pid())
        self._pause(way)

    def add_pyzmq(self) -> None:
        """Raw pyzmq with as many bytes as a batched step has: a round trip, and replies of which none was asked for."""
        sizes = wire_bytes(self._task.observation_space, self._task.action_space)
        request, reply = (self._task.num_envs * size for size in sizes)
        self.add(ECHO, self._without_envs(echo(request, reply)))
        self.add(ONE_WAY, self._without_envs(one_way(reply)))

    def add_rival(self, rival: Rival) -> None:
        """Another package's way, if that is installed and has such envs; why it failed to begin is kept."""
        if rival.forks and self._task.num_envs > PROCESSES_MAX:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they would be about the package, and in the way of the table
                if rival.installed():
                    self.add(rival.name, rival.enter(self._task))
        except CannotHost:
            return
        except Exception as error:  # whatever a foreign package raises; the others go on without it
            self.failures[rival.name] = f"{type(error).__name__}: {error}".partition("\n")[0]

    @contextlib.contextmanager
    def _without_envs(self, made: AbstractContextManager[Callable[[], object]]) -> Iterator[Entrant]:
        with made as step:
            yield Entrant(step, self._task.num_envs, None)

    def measure(
        self, seconds: float, repeats: int, after_each: Callable[[], object] = lambda: None
    ) -> dict[str, Measurement]:
        """Time every way for ``seconds`` in each of ``repeats`` turns; measurements by way."""
        cpu_s, wall_s = dict.fromkeys(self.entrants, 0.0), dict.fromkeys(self.entrants, 0.0)

        @contextlib.contextmanager
        def turn(way: str) -> Iterator[None]:
            self._resume(way)
            # This process's own time is read last before it and first after it: to read the others' takes some of it.
            before, begun_s = cpu_seconds_of_others() + time.process_time(), time.perf_counter()
            try:
                yield
                wall_s[way] += time.perf_counter() - begun_s
                cpu_s[way] += time.process_time() + cpu_seconds_of_others() - before
            finally:
                self._pause(way)
            after_each()

        summaries = self.run(seconds, repeats, turn)
        return {
            way: Measurement(
                self._task.num_envs, entrant.processes, summaries[way], cpu_s[way] / wall_s[way], self._memory_mb[way]
            )
            for way, entrant in self.entrants.items()
        }

    def _pause(self, way: str) -> None:
        entrant = self.entrants[way]
        if isinstance(entrant, SpinningEntrant):
            entrant.pause()

    def _resume(self, way: str) -> None:
        entrant = self.entrants[way]
        if isinstance(entrant, SpinningEntrant):
            entrant.resume()


def wire_bytes(observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> tuple[int, int]:
    """The bytes per env of the arrays that a step sends, and of those it gets, without headers and infos."""
    sent, given = (sum(leaf.nbytes for leaf in spaces.leaves(space)) for space in (action_space, observation_space))
    return sent, given + RESULT_BYTES
