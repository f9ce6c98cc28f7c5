"""A contest: several ways to step the same envs, all made ready first, then timed in turn."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import psutil
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

import envhub
from envhub import spaces
from envhub.layout import RESULT_BYTES, Leaf
from envhub_client.echo import echo
from envhub_client.timing import Summary, interleave, summarize
from envhub_client.workloads import factory

ASYNC, SYNC, ECHO = "AsyncVectorEnv", "SyncVectorEnv", "pyzmq echo"
PRIVATE, WIRE, IPC, TCP = "private hub", "private, wire", "hub over ipc", "hub over tcp"
ACTION_BATCHES = 16
SEED = 1


@dataclass(frozen=True)
class Result:
    """What was found for one way.

    Attributes:
        num_envs: how many envs it stepped.
        processes: how many processes those are in; 0 is this one, None where there are no envs.
        summary: the timing.
        cores: how many CPUs this program and all that it started kept busy meanwhile.
    """

    num_envs: int
    processes: int | None
    summary: Summary
    cores: float


class Contest(contextlib.ExitStack):
    """Ways to step ``num_envs`` envs of one kind; use it in ``with``, add the ways, then ``run`` it.

    Every way gets the same seeds and the same random actions, drawn beforehand.
    """

    def __init__(self, env: str, num_envs: int) -> None:
        """Begin without any way.

        Args:
            env: a Gymnasium id, or one of ``envhub_client.workloads``.
            num_envs: how many.
        """
        super().__init__()
        self.num_envs = num_envs
        self._env = env
        self._factories = [factory(env)] * num_envs
        self._steps: dict[str, Callable[[], object]] = {}
        self._processes: dict[str, int | None] = {}

    def add_async(self) -> None:
        """Gymnasium's ``AsyncVectorEnv``. It forks: add it before the ways that start threads, which are the hubs."""
        self._add(ASYNC, self.enter_context(_ending_its_workers(AsyncVectorEnv(self._factories))), self.num_envs)

    def add_sync(self) -> None:
        """Gymnasium's ``SyncVectorEnv``."""
        self._add(SYNC, self.enter_context(contextlib.closing(SyncVectorEnv(self._factories))), 0)

    def add_private_hub(self) -> None:
        """The private hub of this program."""
        # By factory, which only a private hub runs: ENVHUB_ADDRESS may name another hub.
        envs = self.enter_context(contextlib.closing(envhub.make_vec(self._factories)))
        self._add(PRIVATE, envs, envs.num_workers)

    def add_wire(self) -> None:
        """The private hub of this program, but by messages, as if it were on another machine."""
        envs = self.enter_context(contextlib.closing(envhub.make_vec(self._factories, lane="wire")))
        self._add(WIRE, envs, envs.num_workers)

    def add_hub(self, way: str, address: str) -> None:
        """A running hub."""
        envs = self.enter_context(contextlib.closing(envhub.make_vec(self._env, self.num_envs, hub=address)))
        self._add(way, envs, envs.num_workers)

    def add_echo(self) -> None:
        """The round trip of raw pyzmq with as many bytes as a batched step has, of which none are computed."""
        with contextlib.closing(self._factories[0]()) as env:
            request, reply = wire_bytes(env.observation_space, env.action_space)
        self._steps[ECHO] = self.enter_context(echo(self.num_envs * request, self.num_envs * reply))
        self._processes[ECHO] = None

    def _add(self, way: str, envs: VectorEnv[Any, Any, Any], processes: int) -> None:
        self._steps[way] = _stepping(envs)
        self._processes[way] = processes

    def run(self, seconds: float, repeats: int, after_each: Callable[[], object] = lambda: None) -> dict[str, Result]:
        """Time every way in turn; results by way.

        Args:
            seconds: how long each way is timed in each turn.
            repeats: how many turns.
            after_each: called after each measurement.
        """
        cpu_s: dict[str, float] = dict.fromkeys(self._steps, 0.0)
        before = 0.0

        def account(way: str) -> None:
            nonlocal before
            now = cpu_seconds()
            if way:
                cpu_s[way] += now - before
                after_each()
            before = now

        times = interleave(self._steps, seconds, repeats, account)
        return {
            way: Result(
                self.num_envs,
                self._processes[way],
                summarize(self.num_envs, found),
                cpu_s[way] / sum(float(repeat.sum()) for repeat in found),
            )
            for way, found in times.items()
        }


def _stepping(envs: VectorEnv[Any, Any, Any]) -> Callable[[], object]:
    envs.action_space.seed(SEED)
    batches = itertools.cycle([envs.action_space.sample() for _ in range(ACTION_BATCHES)])
    envs.reset(seed=SEED)
    return lambda: envs.step(next(batches))


@contextlib.contextmanager
def _ending_its_workers(envs: AsyncVectorEnv) -> Iterator[AsyncVectorEnv]:
    try:
        yield envs
    except BaseException:
        # Ctrl-C has ended the workers, too, and closing in good order would wait for their answers.
        for process in envs.processes:
            process.terminate()
            process.join()
        envs.closed = True
        raise
    envs.close()


def cpu_seconds() -> float:
    """CPU time of this process and of all that it started and that still run."""
    total = 0.0
    for process in (this := psutil.Process(), *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            total += times.user + times.system
    return total


def wire_bytes(observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> tuple[int, int]:
    """The bytes per env of the arrays that a step sends, and of those it gets, without headers and infos."""
    return _leaf_bytes(spaces.leaves(action_space)), _leaf_bytes(spaces.leaves(observation_space)) + RESULT_BYTES


def _leaf_bytes(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.items * np.dtype(leaf.dtype).itemsize for leaf in leaves)
