"""Times every verb of a vector env, and values of every size and kind, next to ``AsyncVectorEnv``.

Each row is measured in a process of its own, in turns: some calls by ``AsyncVectorEnv``, some by each lane, and again.
A cell says how many times as fast the lane is: the median over the turns, and the quartiles. Words choose the rows:

cd tests/benchmarks
python -m side_by_side.shapes
python -m side_by_side.shapes render "list of dicts" --lanes shared,tcp,rlmesh --turns 15
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np
import psutil
from envhub_client.private_hub.process import private_hub
from envhub_client.tools.bench import ASYNC, ServedHub, duration, machine_line, served_hub
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

import envhub
from side_by_side.rlmesh_peer import RemoteEnvs
from side_by_side.workloads import IMAGE, SPACES, Synthetic, entry

CARTPOLE, SYNTHETIC = "CartPole-v1", "Synthetic"
SHARED, IPC, TCP, RLMESH = "shared", "ipc", "tcp", "rlmesh"
WARM_CALLS = 3
ROW_TIMEOUT_S = 240.0  # on a machine that is busy with other things
READY_TURNS = 3

Call = Callable[[], object]
Verb = Callable[[Any], Call]


@dataclass(frozen=True)
class Row:
    """What is timed: a call of a vector env of so many envs."""

    name: str
    num_envs: int
    verb: Verb
    env: dict[str, Any] | None = field(default_factory=dict)  # arguments of ``Synthetic``, or None for CartPole
    options: dict[str, Any] = field(default_factory=dict)  # of ``make_vec``, which ``AsyncVectorEnv`` has not
    mode: str = "NEXT_STEP"

    def makers(self, hub: ServedHub) -> Mapping[str, Callable[[], Any]]:
        """A function for each way that makes the vector env; ``AsyncVectorEnv`` forks, and so comes first."""
        mode: dict[str, Any] = {"autoreset_mode": AutoresetMode[self.mode]}
        make: Callable[[], Any] = partial(gymnasium.make, CARTPOLE)
        named = partial(envhub.make_vec, CARTPOLE, self.num_envs, **mode, **self.options)
        private, in_memory = named, True
        if self.env is not None:
            make = partial(Synthetic, **self.env)
            named = partial(envhub.make_vec, SYNTHETIC, self.num_envs, env_kwargs=self.env, **mode, **self.options)
            private = partial(envhub.make_vec, [make] * self.num_envs, **mode, **self.options)
            in_memory = self.env.get("observed") not in ("Sequence", "Graph")  # for which it has no shared memory
        return {
            ASYNC: lambda: AsyncVectorEnv([make] * self.num_envs, shared_memory=in_memory, **mode),
            SHARED: private,
            IPC: lambda: named(hub=hub.ipc, lane="wire"),
            TCP: lambda: named(hub=hub.tcp, lane="wire"),
            RLMESH: lambda: RemoteEnvs(make, self.num_envs),
        }


def step(envs: Any) -> Call:
    envs.action_space.seed(1)
    actions = itertools.cycle([envs.action_space.sample() for _ in range(16)])
    return lambda: envs.step(next(actions))


def step_and_reset(envs: Any) -> Call:
    """A step and the reset of those whose episode it ended."""
    stepped = step(envs)

    def both() -> None:
        results: Any = stepped()
        if (ended := results[2] | results[3]).any():
            envs.reset(options={"reset_mask": ended})

    return both


def reset(envs: Any) -> Call:
    return envs.reset  # type: ignore[no-any-return]


def masked_reset(envs: Any) -> Call:
    mask = np.arange(envs.num_envs) % 2 == 0
    return lambda: envs.reset(options={"reset_mask": mask})


def seeded_reset(envs: Any) -> Call:
    seeds = itertools.count()
    return lambda: envs.reset(seed=[next(seeds) for _ in range(envs.num_envs)], options={"level": 3, "map": "maze"})


def call(name: str) -> Verb:
    return lambda envs: lambda: envs.call(name)


def get_attr(envs: Any) -> Call:
    return lambda: envs.get_attr("gravity")


def set_attr(envs: Any) -> Call:
    return lambda: envs.set_attr("gravity", [9.8] * envs.num_envs)


def render(envs: Any) -> Call:
    return envs.render  # type: ignore[no-any-return]


def after_step(verb: Verb) -> Verb:
    def both(envs: Any) -> Call:
        stepped, then = step(envs), verb(envs)
        return lambda: (stepped(), then())

    return both


def rows() -> Iterator[Row]:
    """All shapes."""
    each = partial(map, lambda parts: Row(*parts))
    yield from (Row("reset", n, reset) for n in (1, 4, 16, 32, 64))
    yield from (Row("reset, CartPole", n, reset, None) for n in (4, 64, 256))
    yield from each((name, n, verb) for name, verb in RESETS.items() for n in (4, 32))
    yield from each((name, n, verb) for name, verb in CALLS.items() for n in (1, 4, 32))
    films = {"84x84": (84, 84), "1080p": (1080, 1920)}
    for size, frame in films.items():
        film = {"frame": frame, "render_mode": "rgb_array"}
        yield from (Row(f"render {size}", n, render, film) for n in ((1, 4, 32) if size == "84x84" else (1, 4)))
        yield Row(f"step and render {size}", 4, after_step(render), film)
    yield Row("step and get_attr", 4, after_step(get_attr))
    yield Row("step and set_attr", 4, after_step(set_attr))
    yield from (Row("step, CartPole", n, step, None) for n in (1, 4, 16, 32, 64, 256))
    for info in (2, 10, 100, "text", "list", "list of dicts"):
        title = f"info of {info} KiB" if isinstance(info, int) else f"info with {info}"
        yield from (Row(title, n, step, {"info": info}) for n in (4, 16))
    yield from (Row(name, n, step, {"observed": name}) for name in SPACES for n in (4, 16))
    sizes = {"4 B": (4,), "4 KiB": (4096,), "256 KiB": (1 << 18,), "1 MiB": (1 << 20,), "4 MiB": (1 << 22,)}
    yield from (Row(f"observe {name}", 4, step, {"observed": shape}) for name, shape in sizes.items())
    yield from (Row("observe 4 MiB", n, step, {"observed": (1 << 22,)}) for n in (1, 16))
    yield from (Row("images", n, step, {"observed": IMAGE}) for n in (1, 4, 16, 64))
    short = {"observed": IMAGE, "episode_steps": 20}
    yield from (Row("images, SAME_STEP", n, step, short, mode="SAME_STEP") for n in (4, 16))
    yield Row("images, NEXT_STEP", 16, step, short)
    yield Row("images, DISABLED", 16, step_and_reset, short, mode="DISABLED")
    yield Row("CartPole, SAME_STEP", 16, step, None, mode="SAME_STEP")
    yield Row("CartPole, DISABLED", 16, step_and_reset, None, mode="DISABLED")
    yield from (Row("busy 1 ms", n, step, {"busy_s": 0.001}) for n in (1, 4, 16, 64))
    yield from (Row("waits 1 ms", n, step, {"wait_s": 0.001}) for n in (1, 4, 16, 64))
    few = {"shared_process": True}
    yield Row("images, shared_process", 16, step, {"observed": IMAGE}, few)
    yield Row("info of 10 KiB, shared_process", 16, step, {"info": 10}, few)
    yield from (Row(f"{name}, shared_process", 16, verb, {}, few) for name, verb in {"reset": reset, **CALLS}.items())


RESETS: dict[str, Verb] = {"masked reset": masked_reset, "reset with seeds and options": seeded_reset}
CALLS: dict[str, Verb] = {
    "call, a float": call("speed"),
    "call, 32 KiB": call("grid"),
    "get_attr": get_attr,
    "set_attr": set_attr,
}


def measured(row: Row, lanes: Sequence[str], hub: ServedHub, turns: int, seconds: float) -> dict[str, Any]:
    """Seconds of a call by each way in each turn, or the error for which there are none."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        calls: dict[str, Call] = {}
        for turn, (way, make) in itertools.product(range(turns + 1), row.makers(hub).items()):
            if way not in (ASYNC, *lanes) or isinstance(found.get(way), str):
                continue
            try:
                if not turn:
                    envs = stack.enter_context(closing(make()))
                    envs.reset(seed=1)
                    calls[way], found[way] = row.verb(envs), []
                else:
                    found[way].append(per_call_s(calls[way], seconds))
            except Exception as error:
                found[way] = f"{type(error).__name__}: {error}".partition("\n")[0][:60]
    return found


def per_call_s(timed: Call, seconds: float) -> float:
    for _ in range(WARM_CALLS):
        timed()
    count, begun_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - begun_s) < seconds or not count:
        timed()
        count += 1
    return taken_s / count


def in_child(work: Callable[..., object], *arguments: object) -> Any:
    """What the function returns in a process of its own, which has no threads yet when ``AsyncVectorEnv`` forks it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, work, *arguments))
    child.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(ROW_TIMEOUT_S) else f"nothing in {ROW_TIMEOUT_S:g} s"
    except EOFError:
        return "the process ended"
    finally:
        child.join(ROW_TIMEOUT_S / 10)
        child.kill()


def _send(sender: Connection, work: Callable[..., object], *arguments: object) -> None:
    sender.send(work(*arguments))


def cell(ours: list[float] | str | None, theirs: list[float]) -> str:
    """How many times as fast, with the quartiles."""
    if not isinstance(ours, list):
        return ours or ""
    low, median, high = np.percentile([other / one for one, other in zip(ours, theirs, strict=True)], [25, 50, 75])
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def ready(way: str, num_envs: int) -> tuple[float, float]:
    """Seconds until envs with a process each have been reset, and MB of the processes that the program has got."""
    begun_s = time.perf_counter()
    if way == ASYNC:
        envs: Any = AsyncVectorEnv([Synthetic] * num_envs)
    else:
        envs = envhub.make_vec([Synthetic] * num_envs, num_workers=num_envs)
    with closing(envs):
        envs.reset(seed=1)
        taken_s = time.perf_counter() - begun_s
        hub = [] if way == ASYNC else [psutil.Process(private_hub().pid)]
        processes = {*psutil.Process().children(recursive=True), *hub}
        return taken_s, sum(process.memory_full_info().pss for process in processes) / 1e6


def print_ready() -> None:
    print("\n| a process per env | ready after | AsyncVectorEnv | ratio | memory | AsyncVectorEnv | ratio |")
    print("|---|---|---|---|---|---|---|")
    for num_envs in (4, 16, 64):
        turns = [[in_child(ready, way, num_envs) for way in (SHARED, ASYNC)] for _ in range(READY_TURNS)]
        (ours_s, ours_mb), (theirs_s, theirs_mb) = np.median(np.array(turns), axis=0)
        seconds, memory = f"{ours_s:.2f} s | {theirs_s:.2f} s", f"{ours_mb:.0f} MB | {theirs_mb:.0f} MB"
        ratios = ours_s / theirs_s, ours_mb / theirs_mb
        print(f"| {num_envs} | {seconds} | {ratios[0]:.1f} | {memory} | {ratios[1]:.1f} |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m side_by_side.shapes", description=__doc__)
    parser.add_argument("words", nargs="*", help="rows that contain one of these, as `render` or `reset 4`, or `ready`")
    parser.add_argument("--lanes", default=f"{SHARED},{IPC},{TCP}", help=f"or {RLMESH}, another package")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.06, help="of each way in each turn")
    asked = parser.parse_args(arguments)
    os.environ.pop("ENVHUB_ADDRESS", None)
    lanes, words = asked.lanes.split(","), asked.words or [""]
    if chosen := [row for row in rows() if any(word in f"{row.name} {row.num_envs}" for word in words)]:
        print(f"{machine_line()}\n\n| | envs | {ASYNC} | {' | '.join(lanes)} |\n|{'---|' * (3 + len(lanes))}")
        with served_hub(CARTPOLE, entry(SYNTHETIC)) as hub:
            for row in chosen:
                found = in_child(measured, row, lanes, hub, asked.turns, asked.seconds)
                theirs = found[ASYNC] if isinstance(found, dict) else found
                if isinstance(theirs, list):
                    cells = [
                        duration(1e6 * float(np.median(theirs))),
                        *(cell(found.get(lane), theirs) for lane in lanes),
                    ]
                else:
                    cells = [theirs]
                print(f"| {row.name} | {row.num_envs} | {' | '.join(cells)} |", flush=True)
    if "ready" in words or "" in words:
        print_ready()


if __name__ == "__main__":
    main()
