"""A contest: ways to step the same envs, all made ready first, then timed in turn, so that other load hits all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from envhub_client.tools.bench import factory
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

import envhub

ASYNC, SYNC, ALONE = "AsyncVectorEnv", "SyncVectorEnv", "env alone"
PRIVATE, PRIVATE_WIRE = "private hub", "private, wire"
IPC, IPC_WIRE, TCP = "hub over ipc", "ipc, wire", "hub over tcp"

PROCESSES_MAX = 256  # a way that takes a process for each env is left out where it would take more
ACTION_BATCHES = 16
SEED = 1
FIRST_STEPS_S = 0.02
WARM_UP = 0.1  # of the time of a measurement

Factory = Callable[[], gymnasium.Env[Any, Any]]


def sized(num_envs: int) -> str:
    """The number with its noun."""
    return f"{num_envs} {'env' if num_envs == 1 else 'envs'}"


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
    """

    step: Callable[[], object]
    env_steps: int
    processes: int | None


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
            yield Entrant(step, task.num_envs, envs.num_workers)
        else:
            yield Entrant(step, task.num_envs, 0)


# --- timing


@dataclass(frozen=True)
class Ratio:
    """Rate of one way to that of another: the median of the repeats, the lowest and the highest."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """Summary of the repeats of one way."""

    rates: tuple[float, ...]  # env-steps/s of each repeat, in order
    p50_us: float  # microseconds of a batched step, the median over all repeats
    p99_us: float  # the 99th percentile of the same

    @property
    def rate(self) -> float:
        """Env-steps/s, the median of the repeats."""
        return float(np.median(self.rates))

    def ratio_to(self, other: Summary) -> Ratio:
        """Number of times as fast as another way in the same turns."""
        ratios = np.array(self.rates) / np.array(other.rates)
        return Ratio(float(np.median(ratios)), float(ratios.min()), float(ratios.max()))


def summarize(env_steps: int, repeats: list[np.ndarray]) -> Summary:
    """Summarize seconds per batched step, one array per repeat; a batched step is of ``env_steps``."""
    rates = tuple(env_steps * len(seconds) / float(seconds.sum()) for seconds in repeats)
    p50, p99 = np.percentile(np.concatenate(repeats), [50, 99]) * 1e6
    return Summary(rates, float(p50), float(p99))


def interleave(
    ways: Mapping[str, Callable[[], object]],
    seconds: float,
    repeats: int,
    turn: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> dict[str, list[np.ndarray]]:
    """Time every way in turn, ``repeats`` times over, each for ``seconds`` after a warm-up.

    Each measurement with its warm-up is made within ``turn`` of the way's name. Returns by name the seconds of every
    batched step, one array per repeat.
    """
    times: dict[str, list[np.ndarray]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, step in ways.items():
            with turn(name):
                step_times(step, WARM_UP * seconds)
                times[name].append(step_times(step, seconds))
    return times


def step_times(step: Callable[[], object], seconds: float) -> np.ndarray:
    """The seconds of each call of ``step``, at least one, until ``seconds`` have passed."""
    times: list[float] = []
    before_s = time.perf_counter()
    end_s = before_s + seconds
    while not times or before_s < end_s:
        step()
        now_s = time.perf_counter()
        times.append(now_s - before_s)
        before_s = now_s
    return np.array(times)


class Contest(contextlib.ExitStack):
    """Ways to step envs; use it in ``with``, ``add`` the ways, then ``run`` it.

    Attributes:
        entrants: by way, in the order in which they were added.
    """

    def __init__(self) -> None:
        """Begin without any way."""
        super().__init__()
        self.entrants: dict[str, Entrant] = {}

    def add(self, way: str, entrant: AbstractContextManager[Entrant]) -> None:
        """Make a way ready, and take its first steps.

        Raises:
            Exception: what the envs raise; the way does not take part then.
        """
        with contextlib.ExitStack() as stack:
            ready = stack.enter_context(entrant)
            step_times(ready.step, FIRST_STEPS_S)
            self.entrants[way] = ready
            self.push(stack.pop_all())

    def run(
        self, seconds: float, repeats: int, turn: Callable[[str], AbstractContextManager[object]] = nullcontext
    ) -> dict[str, Summary]:
        """Time every way for ``seconds`` in each of ``repeats`` turns, each within ``turn`` of its name."""
        steps = {way: entrant.step for way, entrant in self.entrants.items()}
        times = interleave(steps, seconds, repeats, turn)
        return {way: summarize(self.entrants[way].env_steps, repeated) for way, repeated in times.items()}
