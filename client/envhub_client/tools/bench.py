"""Command ``envhub bench``: which way to step an env is fastest on this machine, and why."""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from rich import box
from rich.console import Console
from rich.table import Table

import envhub
from envhub.errors import RequestRefused
from envhub_client.tools.served_hub import ServedHub, served_hub


def named_function(text: str, kind: str) -> Any:
    """Import what ``module:function`` names; modules in the working directory come after those installed."""
    module, _, name = text.partition(":")
    if not (module and name):
        raise RequestRefused(f"a {kind} is written module:function, got {text!r}")
    if "" not in sys.path:
        sys.path.append("")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestRefused(f"there is no {kind} {text!r}: {error}") from error


ASYNC, SYNC = "AsyncVectorEnv", "SyncVectorEnv"
PRIVATE, IPC, TCP = "private hub", "hub over ipc", "hub over tcp"
PROCESSES_MAX = 256  # more envs are too many for a process each
SEED = 1
ALONE_S = 0.2

Factory = Callable[[], gymnasium.Env[Any, Any]]
Ways = Mapping[str, Callable[[], VectorEnv[Any, Any, Any]]]


@dataclass(frozen=True)
class Result:
    """Measurements of one way."""

    processes: int  # that the envs are in; 0 is this one
    rates: list[float]  # env-steps/s of each repeat
    batch_us: float  # a step of all envs
    envs_us: float  # of it the envs run: those of the process that has most, or those of a CPU


def run(
    console: Console, entries: Sequence[str], sizes: Sequence[int], seconds: float, repeats: int, as_json: bool
) -> None:
    """Time the ways to step each env, and print them with the fastest; arguments as of ``envhub bench``."""
    machine = machine_line()  # before the bench itself is the load
    factories = {entry: factory(entry) for entry in entries}
    with served_hub(*entries) as hub:
        for (entry, make), num_envs in itertools.product(factories.items(), sizes):
            results = timed(ways(entry, make, num_envs, hub), seconds, repeats, alone_us(make))
            if as_json:
                record = {"env": entry, "num_envs": num_envs, "fastest": fastest(results), "machine": machine}
                console.print_json(json.dumps({**record, "ways": {way: vars(each) for way, each in results.items()}}))
            else:
                console.print(table(f"{entry}, {num_envs} envs, {repeats} x {seconds:g} s", results))
                console.print(verdict(num_envs, results), "", sep="\n", markup=False, soft_wrap=True)
    if not as_json:
        console.print(machine, markup=False, soft_wrap=True)


def factory(entry: str) -> Factory:
    """The factory of the env that ``envhub serve`` offers by this entry."""
    name, is_factory, place = entry.partition("=")
    if not name or "*" in name:
        raise RequestRefused(f"an env is an id, module:id or name=module:factory, got {entry!r}")
    made_by_id = functools.partial(gymnasium.make, f"ale_py:{entry}" if entry.startswith("ALE/") else entry)
    return named_function(place, "factory") if is_factory else made_by_id


def ways(entry: str, make: Factory, num_envs: int, hub: ServedHub) -> Ways:
    """The ways to step these envs. The first one forks, which is not safe once others have started threads."""
    name, factories = entry.partition("=")[0].rpartition(":")[2], [make] * num_envs
    by_hub = functools.partial(envhub.make_vec, name, num_envs)
    makers: dict[str, Callable[[], VectorEnv[Any, Any, Any]]] = {
        ASYNC: lambda: AsyncVectorEnv(factories),
        SYNC: lambda: SyncVectorEnv(factories),
        # By factories, which only a private hub runs: ENVHUB_ADDRESS may name another hub.
        PRIVATE: lambda: envhub.make_vec(factories),
        IPC: lambda: by_hub(hub=hub.ipc),
        TCP: lambda: by_hub(hub=hub.tcp),
    }
    return makers if num_envs <= PROCESSES_MAX else {way: makers[way] for way in makers if way != ASYNC}


def alone_us(make: Factory) -> tuple[float, bool]:
    """Microseconds of a step of one env in this process, and whether it mostly computes, rather than waits."""
    with closing(make()) as env:

        def step(action: Any) -> None:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

        env.reset(seed=SEED)
        actions = [env.action_space.sample() for _ in range(16)]
        times(step, actions, ALONE_S / 10)
        cpu_s = time.process_time()
        seconds_taken = times(step, actions, ALONE_S)
        cpu_s = time.process_time() - cpu_s
        median_s = float(np.median(seconds_taken))  # in which nothing else had the CPU, however busy the machine is
        return median_s * 1e6, cpu_s / len(seconds_taken) > median_s / 2


def timed(ways: Ways, seconds: float, repeats: int, alone: tuple[float, bool] = (0.0, False)) -> dict[str, Result]:
    """Time every way in turn, so that other load of the machine meets all; ``alone`` is as of ``alone_us``."""
    repeated: dict[str, list[np.ndarray]] = {way: [] for way in ways}
    with ExitStack() as stack:
        envs = {way: stack.enter_context(ready(make)) for way, make in ways.items()}
        for _, (way, each) in itertools.product(range(repeats), envs.items()):
            each.action_space.seed(SEED)
            batches = [each.action_space.sample() for _ in range(16)]
            times(each.step, batches, seconds / 10)
            repeated[way].append(times(each.step, batches, seconds))
        return {way: _result(envs[way], repeated[way], *alone) for way in ways}


def _result(envs: VectorEnv[Any, Any, Any], repeated: list[np.ndarray], alone_us: float, computes: bool) -> Result:
    rates = [float(len(each) * envs.num_envs / each.sum()) for each in repeated]
    processes = getattr(envs, "num_workers", envs.num_envs if isinstance(envs, AsyncVectorEnv) else 0)
    share = -(-envs.num_envs // max(1, processes))
    by_cpu = envs.num_envs / len(os.sched_getaffinity(0)) if computes else 0.0
    batch_us = float(np.median(np.concatenate(repeated))) * 1e6
    return Result(processes, rates, batch_us, min(batch_us, alone_us * max(share, by_cpu)))


@contextmanager
def ready(make: Callable[[], VectorEnv[Any, Any, Any]]) -> Iterator[VectorEnv[Any, Any, Any]]:
    envs = make()
    try:
        envs.reset(seed=SEED)
        yield envs
    except BaseException:
        if isinstance(envs, AsyncVectorEnv):  # Ctrl-C has reached its processes, too: it would wait for their answers
            envs.close(terminate=True)
        raise
    finally:
        envs.close()


def times(step: Callable[[Any], object], actions: Sequence[Any], seconds: float) -> np.ndarray:
    """The seconds of each call of ``step``, at least one, until ``seconds`` have passed."""
    seconds_taken: list[float] = []
    before_s = time.perf_counter()
    end_s = before_s + seconds
    for action in itertools.cycle(actions):
        step(action)
        now_s = time.perf_counter()
        seconds_taken.append(now_s - before_s)
        before_s = now_s
        if now_s >= end_s:
            break
    return np.array(seconds_taken)


# --- the report -------------------------------------------------------------------------------------------------------


def rate(result: Result) -> float:
    return float(np.median(result.rates))


def fastest(results: Mapping[str, Result]) -> str:
    return max(results, key=lambda way: rate(results[way]))


def ratios(result: Result, other: Result) -> list[float]:
    """Number of times as fast as another way: the median of the repeats, the lowest and the highest."""
    by_repeat = np.array(result.rates) / np.array(other.rates)
    return [float(np.median(by_repeat)), float(by_repeat.min()), float(by_repeat.max())]


def table(title: str, results: Mapping[str, Result]) -> Table:
    """A row for each way; ``x`` compares it with ``AsyncVectorEnv``, or with ``SyncVectorEnv`` where there is none."""
    baseline = results[ASYNC if ASYNC in results else SYNC]
    rows = Table(title=title, box=box.SIMPLE, padding=0)
    rows.add_column("stepped by", no_wrap=True)
    for name in ("procs", "steps/s", "batch", "envs", "x", "spread"):
        rows.add_column(name, justify="right", no_wrap=True)
    for way, result in results.items():
        median, low, high = ratios(result, baseline)
        spent = [duration(result.batch_us), duration(result.envs_us)]
        compared = [f"{median:,.2f}", f"{low:,.2f}-{high:,.2f}"]
        rows.add_row(way, str(result.processes), f"{rate(result):,.0f}", *spent, *compared)
    return rows


def verdict(num_envs: int, results: Mapping[str, Result]) -> str:
    way = fastest(results)
    best = results[way]
    close = [other for other, result in results.items() if other != way and ratios(result, best)[2] >= 1.0]
    text = f"{way} is fastest" + (f", but {' and '.join(close)} came before it in a repeat." if close else ".")
    where = f"{best.processes} processes step up to {-(-num_envs // max(1, best.processes))} envs each"
    text += f" {where if best.processes else 'It steps one env after the other and sends no message'}."
    for other in dict.fromkeys(each for each in (way, SYNC, ASYNC) if each in results):
        own_us = results[other].batch_us - results[other].envs_us
        spent = f"{duration(results[other].envs_us)} for the envs and {duration(own_us)} of its own"
        text += f" {other} takes {duration(results[other].batch_us)} for a step of all envs: {spent}."
    return text


def duration(us: float) -> str:
    value, unit = next(((us / size, unit) for unit, size in (("s", 1e6), ("ms", 1e3)) if us >= size), (us, "µs"))
    return f"{value:.3g} {unit}"


def machine_line() -> str:
    cores = f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()} cores ({platform.machine()})"
    load = "load before " + " ".join(f"{value:.1f}" for value in os.getloadavg())
    packages = (f"{package} {version(package)}" for package in ("gymnasium", "pyzmq", "numpy"))
    return ", ".join([cores, load, f"Python {platform.python_version()}", f"envhub {envhub.__version__}", *packages])
