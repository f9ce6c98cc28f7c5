"""Commands ``envhub bench``, which way to step an env is fastest on this machine, and why, and ``envhub demo``."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from rich import box
from rich.console import Console
from rich.table import Table

import envhub
from envhub.errors import HubUnreachable, RequestRefused
from envhub_client.tools import cem_cartpole

ASYNC, SYNC = "AsyncVectorEnv", "SyncVectorEnv"
PRIVATE, IPC, TCP = "private hub", "hub over ipc", "hub over tcp"
PROCESSES_MAX = 256  # more envs are too many for a process each
SEED = 1
ALONE_S = 0.2
DEMO_ENV, DEMO_S, DEMO_REPEATS = "CartPole-v1", 0.5, 3
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0  # a hub takes up to 5 s to drain and 2 s more to close its envs
POLL_S = 0.01
LISTENING = "listening on "

Factory = Callable[[], gymnasium.Env[Any, Any]]
Ways = Mapping[str, Callable[[], VectorEnv[Any, Any, Any]]]


@dataclass(frozen=True)
class Result:
    """Measurements of one way."""

    processes: int  # that the envs are in; 0 is this one
    rates: list[float]  # env-steps/s of each repeat
    batch_us: float  # a step of all envs
    envs_us: float  # of it the envs run: those of the process that has most, or those of a CPU


class ServedHub(NamedTuple):
    """Addresses of a hub, and its process."""

    tcp: str
    ipc: str
    pid: int


def run(console: Console, entries: Sequence[str], sizes: Sequence[int], seconds: float, repeats: int) -> None:
    """Time the ways to step each env, and print them with the fastest; arguments as of ``envhub bench``."""
    machine = machine_line()  # before the bench itself is the load
    factories = {entry: factory(entry) for entry in entries}
    with served_hub(*entries) as hub:
        for (entry, make), num_envs in itertools.product(factories.items(), sizes):
            results = timed(ways(entry, make, num_envs, hub), seconds, repeats, one_env_us(make))
            console.print(table(f"{entry}, {num_envs} envs, {repeats} x {seconds:g} s", results))
            console.print(verdict(num_envs, results), "", sep="\n", markup=False, soft_wrap=True)
    console.print(machine, markup=False, soft_wrap=True)


def demo(console: Console) -> None:
    """Serve, learn by ``client/examples/cem_cartpole.py`` as a remote trainer would, and compare ways to step."""
    num_envs = cem_cartpole.NUM_ENVS
    with served_hub(DEMO_ENV) as hub:
        console.print(f"a hub serves {DEMO_ENV} at {hub.tcp} and {hub.ipc}", soft_wrap=True)
        console.print(f"learning with {num_envs} envs over tcp:")
        if cem_cartpole.learn(hub.tcp, SEED, console) <= cem_cartpole.SOLVED:
            sys.exit(1)
        console.print("stepping over tcp, over ipc, and by AsyncVectorEnv, in turn:")
        makers = ways(DEMO_ENV, lambda: gymnasium.make(DEMO_ENV), num_envs, hub)
        results = timed({way: makers[way] for way in (ASYNC, IPC, TCP)}, DEMO_S, DEMO_REPEATS)
    console.print(table(f"{num_envs} {DEMO_ENV} envs, medians of {DEMO_REPEATS} interleaved repeats", results))


def factory(entry: str) -> Factory:
    name, is_factory, factory = entry.partition("=")
    if not name or "*" in name:
        raise RequestRefused(f"an env is an id, module:id or name=module:factory, got {entry!r}")
    if not is_factory:
        return functools.partial(gymnasium.make, f"ale_py:{entry}" if entry.startswith("ALE/") else entry)
    module, _, function = factory.partition(":")
    if not (module and function):
        raise RequestRefused(f"a factory is written module:function, got {factory!r}")
    if "" not in sys.path:
        sys.path.append("")  # modules in the working directory come after those installed
    try:
        made: Factory = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestRefused(f"there is no factory {factory!r}: {error}") from error
    return made


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


def one_env_us(make: Factory) -> tuple[float, bool]:
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


def timed(ways: Ways, seconds: float, repeats: int, one_env: tuple[float, bool] = (0.0, False)) -> dict[str, Result]:
    """Time every way in turn, so that other load of the machine meets all; ``one_env`` is as of ``one_env_us``."""
    repeated: dict[str, list[np.ndarray]] = {way: [] for way in ways}
    with ExitStack() as stack:
        envs = {way: stack.enter_context(ready(make)) for way, make in ways.items()}
        for _, (way, each) in itertools.product(range(repeats), envs.items()):
            each.action_space.seed(SEED)
            batches = [each.action_space.sample() for _ in range(16)]
            times(each.step, batches, seconds / 10)
            repeated[way].append(times(each.step, batches, seconds))
        return {way: _result(envs[way], repeated[way], *one_env) for way in ways}


def _result(envs: VectorEnv[Any, Any, Any], repeated: list[np.ndarray], one_env_us: float, computes: bool) -> Result:
    rates = [float(len(each) * envs.num_envs / each.sum()) for each in repeated]
    processes = getattr(envs, "num_workers", envs.num_envs if isinstance(envs, AsyncVectorEnv) else 0)
    envs_per_process = -(-envs.num_envs // max(1, processes))
    by_cpu = envs.num_envs / len(os.sched_getaffinity(0)) if computes else 0.0
    batch_us = float(np.median(np.concatenate(repeated))) * 1e6
    return Result(processes, rates, batch_us, min(batch_us, one_env_us * max(envs_per_process, by_cpu)))


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


@contextmanager
def served_hub(*envs: str) -> Iterator[ServedHub]:
    """Serve ``envs`` at a tcp address and an ipc one until the block is left, also by Ctrl-C, SIGTERM or SIGHUP."""
    with tempfile.TemporaryDirectory(prefix="envhub-") as folder, _signals_unwind():
        printed, ipc = Path(folder, "printed"), f"ipc://{folder}/hub.sock"
        # A file, no pipe: what workers print goes the same way, and nothing would empty a pipe later on.
        with printed.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "envhub", "serve", *envs, "--bind", "tcp://127.0.0.1:0", "--bind", ipc],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C on the terminal is the program's, which ends the hub in good order
            )
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while f"{LISTENING}{ipc}\n" not in (text := printed.read_text()):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise HubUnreachable(f"`envhub serve` did not start: {text.strip()}")
                time.sleep(POLL_S)
            yield ServedHub(text.partition(LISTENING)[2].partition("\n")[0], ipc, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass
            finally:  # also where a second Ctrl-C ended the wait; the workers of a killed hub end with it
                process.kill()
                process.wait()


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does, through every ``finally``."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what signals do
        return
    # A program under nohup ignores SIGHUP, and one that has handlers of its own knows better.
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def rate(result: Result) -> float:
    return float(np.median(result.rates))


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
    way = max(results, key=lambda each: rate(results[each]))
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
