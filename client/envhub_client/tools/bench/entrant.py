"""Entrants of a contest, each of which is ready to step envs, and the task that they step."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

import envhub
from envhub.errors import RequestRefused
from envhub_client.tools.named_function import named_function

ASYNC, SYNC, ALONE = "AsyncVectorEnv", "SyncVectorEnv", "env alone"
PRIVATE, PRIVATE_WIRE = "private hub", "private, wire"
IPC, IPC_WIRE, TCP = "hub over ipc", "ipc, wire", "hub over tcp"

PROCESSES_MAX = 256  # a way that takes a process for each env is left out where it would take more
ACTION_BATCHES = 16
SEED = 1

Factory = Callable[[], gymnasium.Env[Any, Any]]


def sized(num_envs: int) -> str:
    """The number with its noun."""
    return f"{num_envs} {'env' if num_envs == 1 else 'envs'}"


def factory(entry: str) -> Factory:
    """Factory of the env that ``envhub serve`` offers by this entry.

    Raises:
        RequestRefused: the entry is no env, or has a factory that does not exist.
    """
    name, is_factory, place = entry.partition("=")
    if not name or "*" in name:
        raise RequestRefused(f"an env is an id, module:id or name=module:factory, got {entry!r}")
    return named_function(place, "factory") if is_factory else functools.partial(_by_id, entry)


def _by_id(name: str) -> gymnasium.Env[Any, Any]:
    return gymnasium.make(f"ale_py:{name}" if name.startswith("ALE/") else name)


class Task:
    """Task of every entrant: the same envs, and the same random actions, drawn beforehand.

    Attributes:
        entry: what ``envhub serve`` takes to offer the env.
        name: the name by which a hub offers it then.
        num_envs: the number of envs.
        factories: of each env.
        observation_space, action_space: of one env.
    """

    def __init__(self, entry: str, num_envs: int) -> None:
        """Make one env and step it: what envs load when they are first used, no entrant shall pay for.

        Raises:
            RequestRefused: as of ``factory``.
            Exception: what Gymnasium raises for an env it cannot make.
        """
        self.entry, self.num_envs = entry, num_envs
        self.name = entry.partition("=")[0].rpartition(":")[2]
        self.factories: list[Factory] = [factory(entry)] * num_envs
        with contextlib.closing(self.factories[0]()) as one:
            self.observation_space: gymnasium.Space[Any] = one.observation_space
            self.action_space: gymnasium.Space[Any] = one.action_space
            one.reset(seed=SEED)
            one.step(self.actions[0])

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


@dataclass(frozen=True)
class Entrant:
    """Entrant that is ready to step.

    Attributes:
        step: makes one batched step.
        env_steps: the number of steps of an env that it is.
        processes: the number of processes that the envs are in; 0 is this one, None where there are no envs.
        sizing: the reason for the number of processes, where a hub has chosen it.
    """

    step: Callable[[], object]
    env_steps: int
    processes: int | None
    sizing: str = ""


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


def sync_entrant(task: Task) -> contextlib.AbstractContextManager[Entrant]:
    """Gymnasium's ``SyncVectorEnv``."""
    return vector_entrant(task, lambda: SyncVectorEnv(task.factories))


def private_entrant(task: Task, **options: Any) -> contextlib.AbstractContextManager[Entrant]:
    """The private hub of this program, with these options of ``make_vec``."""
    # By factory, which only a private hub runs: ENVHUB_ADDRESS may name another hub.
    return vector_entrant(task, lambda: envhub.make_vec(task.factories, **options))


def hub_entrant(task: Task, address: str, **options: Any) -> contextlib.AbstractContextManager[Entrant]:
    """A running hub that offers the task's env, with these options of ``make_vec``."""
    return vector_entrant(task, lambda: envhub.make_vec(task.name, task.num_envs, hub=address, **options))


@contextlib.contextmanager
def vector_entrant(task: Task, make: Callable[[], VectorEnv[Any, Any, Any]]) -> Iterator[Entrant]:
    """The vector env that ``make`` returns: of a hub, or with all its envs in this process."""
    with contextlib.closing(make()) as envs:
        envs.reset(seed=SEED)
        step = cycled(envs.step, task.batches)
        if isinstance(envs, envhub.HubVectorEnv):
            yield Entrant(step, task.num_envs, envs.num_workers, envs.sizing.reason)
        else:
            yield Entrant(step, task.num_envs, 0)
