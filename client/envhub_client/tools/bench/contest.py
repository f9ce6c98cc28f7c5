"""A contest: several ways to step the same envs, all made ready first, then timed in turn."""

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
import numpy as np
from gymnasium.vector import SyncVectorEnv

import envhub
from envhub.arena.layout import RESULT_BYTES
from envhub.values import spaces
from envhub_client.private_hub.process import private_hub
from envhub_client.tools.bench import entrant as entrants
from envhub_client.tools.bench.echo import echo, one_way
from envhub_client.tools.bench.resources import Memory, added_mb, cpu_seconds_of_others, memory
from envhub_client.tools.bench.rivals import Rival
from envhub_client.tools.bench.timing import Summary, interleave, step_times, summarize

ECHO, ONE_WAY = "pyzmq echo", "pyzmq one-way"
FIRST_STEPS_S = 0.02


@dataclass(frozen=True)
class Result:
    """Measurements of one way."""

    num_envs: int
    processes: int | None  # that the envs are in; 0 is this one, None where there are no envs
    summary: Summary
    cores: float  # how many CPUs this program and all that it started kept busy meanwhile
    memory_mb: float  # megabytes (PSS) that the way added, after its first steps


class Contest(contextlib.ExitStack):
    """Ways to step ``num_envs`` envs of one kind; use it in ``with``, add the ways, then ``run`` it.

    Every way gets the same seeds and the same random actions, drawn beforehand.

    Attributes:
        task: what is stepped.
        failures: by name of a rival, why it is not among the ways though it is installed.
    """

    def __init__(self, env: str, num_envs: int) -> None:
        """Begin without any way; arguments and errors as for ``Task``."""
        super().__init__()
        self.task = entrants.Task(env, num_envs)
        self.failures: dict[str, str] = {}
        self._entrants: dict[str, entrants.Entrant] = {}
        self._memory: Memory | None = None  # after the last way was added
        self._memory_mb: dict[str, float] = {}

    @property
    def ways(self) -> list[str]:
        """Sums of what was added so far."""
        return list(self._entrants)

    def add_alone(self) -> None:
        """One env, in this process."""
        self.add(entrants.ALONE, entrants.alone_entrant(self.task))

    def add_async(self) -> None:
        """Gymnasium's ``AsyncVectorEnv``. It forks: add it before the ways that start threads, which are the hubs."""
        self.add(entrants.ASYNC, entrants.async_entrant(self.task))

    def add_sync(self) -> None:
        """Gymnasium's ``SyncVectorEnv``."""
        self.add(entrants.SYNC, entrants.vector_entrant(self.task, lambda: SyncVectorEnv(self.task.factories), 0))

    def add_private_hub(self, way: str = entrants.PRIVATE, **options: Any) -> None:
        """The private hub of this program, with these options of ``make_vec``."""
        # By factory, which only a private hub runs: ENVHUB_ADDRESS may name another hub.
        made = entrants.vector_entrant(self.task, lambda: envhub.make_vec(self.task.factories, **options))
        self.add(way, made, lambda: private_hub().pid)

    def add_hub(self, way: str, address: str, pid: int | None = None) -> None:
        """A running hub; with its pid, its memory counts, too."""
        task = self.task
        made = entrants.vector_entrant(task, lambda: envhub.make_vec(task.env, task.num_envs, hub=address))
        self.add(way, made, lambda: pid)

    def add_pyzmq(self) -> None:
        """Raw pyzmq with as many bytes as a batched step has: a round trip, and replies of which none was asked for."""
        sizes = wire_bytes(self.task.observation_space, self.task.action_space)
        request, reply = (self.task.num_envs * size for size in sizes)
        self.add(ECHO, self._without_envs(echo(request, reply)))
        self.add(ONE_WAY, self._without_envs(one_way(reply)))

    def add_rival(self, rival: Rival) -> None:
        """Another package's way, if that is installed and has such envs; why it failed to begin is kept."""
        if rival.forks and self.task.num_envs > entrants.PROCESSES_MAX:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they would be about the package, and in the way of the table
                if rival.installed():
                    self.add(rival.name, rival.enter(self.task))
        except entrants.CannotHost:
            return
        except Exception as error:  # whatever a foreign package raises; the bench goes on without it
            self.failures[rival.name] = f"{type(error).__name__}: {error}".partition("\n")[0]

    @contextlib.contextmanager
    def _without_envs(self, made: AbstractContextManager[Callable[[], object]]) -> Iterator[entrants.Entrant]:
        with made as step:
            yield entrants.Entrant(step, self.task.num_envs, None)

    def add(
        self,
        way: str,
        entrant: AbstractContextManager[entrants.Entrant],
        hub_pid: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Make a way ready, take its first steps, and see what memory that took; ``hub_pid`` is asked thereafter."""
        gc.collect()  # beforehand only: it writes to what forked processes share with this one, which unshares it
        before = memory(self._memory)
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(entrant)
            step_times(found.step, FIRST_STEPS_S)
            self._memory = memory()
            self._memory_mb[way] = added_mb(before, self._memory, hub_pid())
            found.pause()
            self._entrants[way] = found
            self.push(stack.pop_all())

    def run(self, seconds: float, repeats: int, after_each: Callable[[], object] = lambda: None) -> dict[str, Result]:
        """Time every way for ``seconds`` in each of ``repeats`` turns; results by way."""
        cpu_s: dict[str, float] = dict.fromkeys(self._entrants, 0.0)

        @contextlib.contextmanager
        def measured(way: str) -> Iterator[None]:
            # This process's own time is read last before it and first after it: to read the others' takes some of it.
            before = cpu_seconds_of_others() + time.process_time()
            yield
            cpu_s[way] += time.process_time() + cpu_seconds_of_others() - before
            after_each()

        steps = {way: entrant.step for way, entrant in self._entrants.items()}
        times = interleave(steps, seconds, repeats, self._turn, measured)
        return {way: self._result(way, found, cpu_s[way]) for way, found in times.items()}

    @contextlib.contextmanager
    def _turn(self, way: str) -> Iterator[None]:
        self._entrants[way].resume()
        try:
            yield
        finally:
            self._entrants[way].pause()

    def _result(self, way: str, repeats: list[np.ndarray], cpu_s: float) -> Result:
        entrant = self._entrants[way]
        summary = summarize(entrant.env_steps, repeats)
        cores = cpu_s / sum(float(repeat.sum()) for repeat in repeats)
        return Result(self.task.num_envs, entrant.processes, summary, cores, self._memory_mb[way])


def wire_bytes(observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> tuple[int, int]:
    """The bytes per env of the arrays that a step sends, and of those it gets, without headers and infos."""
    sent, given = (sum(leaf.nbytes for leaf in spaces.leaves(space)) for space in (action_space, observation_space))
    return sent, given + RESULT_BYTES
