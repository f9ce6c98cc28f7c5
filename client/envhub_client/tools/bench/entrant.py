"""Entrants of a contest, each of which is ready to step envs, and the task that they step."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

import envhub
from envhub_client.tools.bench.workloads import Factory, factory

ASYNC, SYNC, ALONE = "AsyncVectorEnv", "SyncVectorEnv", "env alone"
PRIVATE, WIRE, IPC, TCP = "private hub", "private, wire", "hub over ipc", "hub over tcp"

PROCESSES_MAX = 256  # a way that takes a process for each env is left out where it would take more
ACTION_BATCHES = 16
SEED = 1


def sized(num_envs: int) -> str:
    """The number with its noun."""
    return f"{num_envs} {'env' if num_envs == 1 else 'envs'}"


class CannotHost(Exception):
    """This entrant has no such envs."""


class Task:
    """Task of every entrant: the same envs, and the same random actions, drawn beforehand. Spaces are of one env."""

    def __init__(self, env: str, num_envs: int) -> None:
        """Make one env and step it: what envs load when they are first used, no entrant shall pay for.

        ``env`` is a Gymnasium id, or one of ``envhub_client.tools.bench.workloads``.

        Raises:
            Exception: what Gymnasium raises for an env it cannot make.
        """
        self.env, self.num_envs = env, num_envs
        with contextlib.closing(factory(env)()) as one:
            self.observation_space: gymnasium.Space[Any] = one.observation_space
            self.action_space: gymnasium.Space[Any] = one.action_space
            one.reset(seed=SEED)
            one.step(self.actions[0])

    @property
    def factories(self) -> list[Factory]:
        """Factory of each env."""
        return [factory(self.env)] * self.num_envs

    @functools.cached_property
    def batches(self) -> list[Any]:
        """Batches of actions, as ``VectorEnv.step`` takes them."""
        space = batch_space(self.action_space, self.num_envs)
        space.seed(SEED)
        return [space.sample() for _ in range(ACTION_BATCHES)]

    @property
    def actions(self) -> list[Any]:
        """Actions of a single env."""
        self.action_space.seed(SEED)
        return [self.action_space.sample() for _ in range(ACTION_BATCHES)]

    def only_arrays(self) -> None:
        """Raise ``CannotHost`` unless observations and actions are an array or a number each."""
        arrays = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
        if not isinstance(self.observation_space, arrays) or not isinstance(self.action_space, arrays):
            raise CannotHost(self.env)


@dataclass(frozen=True)
class Entrant:
    """Entrant that is ready to step."""

    step: Callable[[], object]  # makes one batched step
    env_steps: int  # how many steps of an env that is
    processes: int | None  # how many processes the envs are in; 0 is this one, None where there are no envs
    spinning: Sequence[int] = ()  # pids of processes that take a CPU each even while they have nothing to do

    def pause(self) -> None:
        """Stop what spins, so that it takes no CPU from the way that is measured meanwhile."""
        for pid in self.spinning:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        for pid in self.spinning:
            os.kill(pid, signal.SIGCONT)


def cycled(step: Callable[[Any], object], choices: Sequence[Any]) -> Callable[[], object]:
    """A step with the next of these actions, again and again."""
    endless = itertools.cycle(choices)
    return lambda: step(next(endless))


@contextlib.contextmanager
def ended(close: Callable[[], object], processes: Sequence[Any]) -> Iterator[None]:
    """Close after the block; but where it raises, terminate these processes instead.

    Ctrl-C reaches them, too, and closing in good order would wait for the answers of those that it has ended.
    """
    try:
        yield
    except BaseException:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        raise
    close()


@contextlib.contextmanager
def alone_entrant(task: Task) -> Iterator[Entrant]:
    """One env in this process, stepped directly and reset at the end of each episode."""
    with contextlib.closing(task.factories[0]()) as env:

        def step(action: Any) -> None:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

        env.reset(seed=SEED)
        yield Entrant(cycled(step, task.actions), 1, 0)


@contextlib.contextmanager
def async_entrant(task: Task) -> Iterator[Entrant]:
    """Gymnasium's ``AsyncVectorEnv``, which forks: make it ready before anything that starts threads."""
    envs = AsyncVectorEnv(task.factories)
    with ended(envs.close, envs.processes):
        try:
            envs.reset(seed=SEED)
            yield Entrant(cycled(envs.step, task.batches), task.num_envs, task.num_envs)
        except BaseException:
            envs.closed = True  # else it closes itself when it is collected, and waits for the answers
            raise


@contextlib.contextmanager
def vector_entrant(
    task: Task, make: Callable[[], VectorEnv[Any, Any, Any]], processes: int | None = None
) -> Iterator[Entrant]:
    """The vector env that ``make`` returns; a hub's says itself how many processes it has."""
    with contextlib.closing(make()) as envs:
        envs.reset(seed=SEED)
        workers = envs.num_workers if isinstance(envs, envhub.HubVectorEnv) else processes
        yield Entrant(cycled(envs.step, task.batches), task.num_envs, workers)
