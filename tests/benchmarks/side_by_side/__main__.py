"""Times every way to step the same envs: EnvHub's, Gymnasium's, those of the packages that are installed, and pyzmq.

The packages are SB3, tianshou, EnvPool and RLMesh. The table in README.md is of this run:

cd tests/benchmarks
python -m side_by_side CartPole-v1 images ALE/Pong-v5 HalfCheetah-v5 busy --seconds 0.3 --repeats 5
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
from envhub_client.tools import bench
from envhub_client.tools.bench import ServedHub, served_hub
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from rich.console import Console

from side_by_side.echo import yardstick
from side_by_side.rlmesh_peer import RemoteEnvs, lanes
from side_by_side.workloads import OWN, entry

SB3, TIANSHOU, ENVPOOL = "SB3 Subproc", "tianshou Shmem", "EnvPool (C++)"
RLMESH = {"RLMesh": SyncVectorEnv, "RLMesh, Async": AsyncVectorEnv, "RLMesh, lanes": lanes}  # in its server
MODULES = {SB3: "stable_baselines3", TIANSHOU: "tianshou", ENVPOOL: "envpool", **dict.fromkeys(RLMESH, "rlmesh")}


def main(arguments: list[str] | None = None, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    asked = parser().parse_args(arguments)
    machine = bench.machine_line()  # before this itself is the load
    with served_hub(*map(entry, asked.envs)) as hub:
        for env, num_envs in itertools.product(asked.envs, map(int, asked.n.split(","))):
            make = bench.factory(entry(env))
            ways = all_ways(env, make, num_envs, hub)
            results = bench.timed(ways, asked.seconds, asked.repeats, bench.one_env_us(make))
            title = f"{env}, {num_envs} envs, {asked.repeats} interleaved repeats of {asked.seconds:g} s"
            console.print(bench.table(title, results))
    console.print(machine, markup=False, soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m side_by_side", description=__doc__)
    options.add_argument("envs", nargs="+", help=f"Gymnasium ids, or {', '.join(OWN)} (side_by_side/workloads.py)")
    options.add_argument("-n", default="1,16,64", help="numbers of envs, separated by commas (1,16,64)")
    options.add_argument("--seconds", type=float, default=1.0, help="seconds that each measurement lasts (1)")
    options.add_argument("--repeats", type=int, default=3, help="how often every way is measured (3)")
    return options


def all_ways(env: str, make: bench.Factory, num_envs: int, hub: ServedHub) -> bench.Ways:
    ours = dict(bench.ways(entry(env), make, num_envs, hub))
    others = {name: rival for name, rival in rivals(env, make, num_envs).items() if find_spec(MODULES[name])}
    # AsyncVectorEnv and those rivals fork, and so come before all that start threads.
    forking = {bench.ASYNC: ours.pop(bench.ASYNC)} if bench.ASYNC in ours else {}
    return {**forking, **others, **ours, **yardstick(make, num_envs)}


def rivals(env: str, make: bench.Factory, num_envs: int) -> bench.Ways:
    """Other packages' vector envs with the parts that are timed; EnvPool has C++ envs of its own, and few."""
    factories = [make] * num_envs

    def sb3() -> Any:
        vec_env: Any = importlib.import_module("stable_baselines3.common.vec_env")
        # As AsyncVectorEnv starts its own; the default, a fork server, would have each import PyTorch for itself.
        envs = vec_env.SubprocVecEnv(factories, start_method="fork")
        return timed(envs, envs.action_space, num_envs, lambda seed: (envs.seed(seed), envs.reset()), envs.step)

    def tianshou() -> Any:
        envs: Any = importlib.import_module("tianshou.env").ShmemVectorEnv(factories)

        def step(actions: Any) -> None:
            _, _, terminated, truncated, _ = envs.step(actions)
            if len(rows := np.flatnonzero(terminated | truncated)):
                envs.reset(rows)

        return timed(envs, envs.action_space[0], num_envs, lambda seed: (envs.seed(seed), envs.reset()), step)

    def envpool() -> Any:
        envs: Any = importlib.import_module("envpool").make_gymnasium(env, num_envs=num_envs, seed=bench.SEED)
        dtype = envs.action_space.dtype
        return timed(envs, envs.action_space, 0, lambda seed: envs.reset(), lambda a: envs.step(np.asarray(a, dtype)))

    def timed(envs: Any, space: Any, processes: int, reset: Any, step: Any) -> Any:
        batch = batch_space(space, num_envs)
        parts = {"num_envs": num_envs, "num_workers": processes, "action_space": batch}
        return SimpleNamespace(**parts, reset=reset, step=step, close=envs.close)

    made: dict[str, Any] = {SB3: sb3, TIANSHOU: tianshou}
    for way, vector in RLMESH.items():
        made[way] = partial(RemoteEnvs, make, num_envs, vector)
    if num_envs > bench.PROCESSES_MAX:
        made = {}
    if find_spec("envpool") and env in importlib.import_module("envpool").list_all_envs():
        made[ENVPOOL] = envpool
    return made


if __name__ == "__main__":
    main()
