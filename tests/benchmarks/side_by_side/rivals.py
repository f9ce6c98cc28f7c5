"""The rivals: other packages that step many envs, timed where they are installed."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from side_by_side import dm_env_rpc_rival, openenv_rival
from side_by_side.arrays import CannotHost, only_arrays
from side_by_side.entrant import SEED, Entrant, Task, cycled, ended
from side_by_side.resources import physical_cpus


@dataclass(frozen=True)
class SpinningEntrant(Entrant):
    """Entrant some of whose processes take a CPU each even while they have nothing to do.

    Attributes:
        spinning: their pids.
    """

    spinning: Sequence[int] = ()

    def pause(self) -> None:
        """Stop what spins, so that it takes no CPU from the way that is measured meanwhile."""
        for pid in self.spinning:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        for pid in self.spinning:
            os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class Rival:
    """A package that steps many envs.

    Attributes:
        name: its name in the table.
        module: what is imported of it.
        enter: make it ready; raises ``CannotHost`` where it has no such envs.
        forks: whether it takes a process for each env.
    """

    name: str
    module: str
    enter: Callable[[Task], AbstractContextManager[Entrant]]
    forks: bool = False

    def installed(self) -> bool:
        """Import it, if it is there.

        Raises:
            ImportError: it is there, but does not work.
        """
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name != self.module.partition(".")[0]:
                raise
            return False
        return True


@contextlib.contextmanager
def sb3(task: Task) -> Iterator[Entrant]:
    """``SubprocVecEnv`` of Stable-Baselines3, which resets an env in the step that ends its episode."""
    vec_env: Any = importlib.import_module("stable_baselines3.common.vec_env")
    # As AsyncVectorEnv starts its own; the default, a fork server, would have each import PyTorch for itself.
    envs = vec_env.SubprocVecEnv(task.factories, start_method="fork")
    with ended(envs.close, envs.processes):
        envs.seed(SEED)
        envs.reset()
        yield Entrant(cycled(envs.step, task.batches), task.num_envs, task.num_envs)


@contextlib.contextmanager
def tianshou(task: Task) -> Iterator[Entrant]:
    """``ShmemVectorEnv`` of Tianshou; its caller resets the envs whose episodes have ended."""
    module: Any = importlib.import_module("tianshou.env")
    envs = module.ShmemVectorEnv(task.factories)

    def step(actions: Any) -> None:
        _, _, terminated, truncated, _ = envs.step(actions)
        if len(rows := np.flatnonzero(terminated | truncated)):
            envs.reset(rows)

    with ended(envs.close, [worker.process for worker in envs.workers]):
        envs.seed(SEED)
        envs.reset()
        yield Entrant(cycled(step, task.batches), task.num_envs, task.num_envs)


@contextlib.contextmanager
def puffer(task: Task) -> Iterator[Entrant]:
    """``Multiprocessing`` of PufferLib, with as many workers as have a core each and the same number of envs."""
    vector: Any = importlib.import_module("pufferlib.vector")
    emulation: Any = importlib.import_module("pufferlib.emulation")
    only_arrays(task)
    cpus = min(len(os.sched_getaffinity(0)), physical_cpus())
    workers = max(number for number in range(1, cpus + 1) if task.num_envs % number == 0)
    made = {"env_kwargs": {"env_creator": task.factories[0]}, "num_envs": task.num_envs, "num_workers": workers}
    envs = vector.make(emulation.GymnasiumPufferEnv, backend=vector.Multiprocessing, **made)
    with ended(envs.close, envs.processes):
        vector.reset(envs, SEED)
        step = cycled(partial(vector.step, envs), task.batches)
        spinning = SpinningEntrant(step, task.num_envs, workers, spinning=[process.pid for process in envs.processes])
        try:
            yield spinning
        finally:
            spinning.resume()  # what is stopped cannot end


@contextlib.contextmanager
def envpool(task: Task) -> Iterator[Entrant]:
    """EnvPool, in threads of this process, with C++ envs of its own: not the code that the others step."""
    module: Any = importlib.import_module("envpool")
    if task.name not in module.list_all_envs():
        raise CannotHost(task.name)
    with contextlib.closing(module.make_gymnasium(task.name, num_envs=task.num_envs, seed=SEED)) as envs:
        dtype = envs.action_space.dtype
        envs.reset()
        batches = [np.asarray(batch, dtype) for batch in task.batches]
        yield Entrant(cycled(envs.step, batches), task.num_envs, 0)


# They fork, so they come before all that start threads.
FORKING = [
    Rival("SB3 Subproc", "stable_baselines3", sb3, forks=True),
    Rival("tianshou Shmem", "tianshou", tianshou, forks=True),
    Rival("PufferLib", "pufferlib", puffer),
]
THREADED = [
    Rival("EnvPool (C++)", "envpool", envpool),
    Rival("dm_env_rpc", "dm_env_rpc", dm_env_rpc_rival.streams),
    Rival("OpenEnv", "openenv", openenv_rival.clients),
]
