"""``python attempt.py PACKAGE PYTHON`` steps a package's env by hubs and in a plain loop, and compares.

``PYTHON`` is that of the package's environment, which also runs this program where EnvHub is installed there. What it
prints last is a line of JSON with what was found on each way.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from packages import PACKAGES, VARIABLES, Package
from plain_loop import NUM_ENVS, SEED, plain, row

import envhub

STEPS = 40
Record = list[Any]


def difference(found: Any, wanted: Any, where: str) -> str:
    """Where two values differ; empty if they are equal to the bit."""
    if isinstance(wanted, dict):
        if set(found) != set(wanted):
            return f"{where}: keys"
        return next(filter(None, (difference(found[key], wanted[key], f"{where}/{key}") for key in wanted)), "")
    if isinstance(wanted, tuple):
        pairs = enumerate(zip(found, wanted, strict=True))
        return next(filter(None, (difference(one, other, f"{where}[{at}]") for at, (one, other) in pairs)), "")
    one, other = np.asarray(found), np.asarray(wanted)
    if one.dtype.kind == other.dtype.kind == "f":  # a batch has the dtype of the space, as that of SyncVectorEnv
        other = other.astype(one.dtype)
    same = one.shape == other.shape and np.array_equal(one, other, equal_nan=other.dtype.kind == "f")
    return "" if same else where


def record_of_hub(envs: Any, actions: list[Any]) -> Record:
    """What a vector env of EnvHub gives, for each env; it is closed."""
    try:
        found = [envs.reset(seed=SEED)[0], *(envs.step(action)[:4] for action in actions)]
        return [[plain(row(one, env)) for one in found] for env in range(NUM_ENVS)]
    finally:
        envs.close()


def wanted_records(package: Package, python: str, actions: list[Any]) -> list[Any]:
    """What each env gives directly, each in a process of its own, or what its process said last; of a vector env,
    what that gives.
    """
    if package.vector:
        found = plain_record(package, python, 0, actions)
        return found if isinstance(found, list) else [found]
    return [plain_record(package, python, env, actions) for env in range(NUM_ENVS)]


def plain_record(package: Package, python: str, env: int, actions: list[Any]) -> Any:
    """What ``plain_loop`` gives; if it fails, the last line that it wrote."""
    program = [python, "plain_loop.py", package.name, str(env)]
    done = subprocess.run(program, input=pickle.dumps(actions, 4), capture_output=True)
    sys.stderr.write(done.stderr.decode(errors="replace"))
    if done.returncode:
        return (done.stderr.decode(errors="replace").split("\n")[:-1] or [f"status {done.returncode}"])[-1]
    return pickle.loads(done.stdout)


@contextlib.contextmanager
def served(package: Package, python: str) -> Iterator[str]:
    """A hub that offers the env; the context's value is its address."""
    entry = package.env if package.by_id else f"tried=factories:{package.env}"
    program = [sys.executable, "-m", "envhub", "serve", entry, "--bind", "tcp://127.0.0.1:0"]
    program += ["--vector"] if package.vector else []
    program += ["--python", python] if package.apart else []
    program += [part for name in VARIABLES for part in ("--worker-env", name)]
    hub = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert hub.stdout is not None
    try:
        yield hub.stdout.readline().split()[-1]
    finally:
        hub.terminate()
        hub.wait(60)


def made(package: Package, python: str, address: str | None) -> Any:
    """A vector env over a private hub, or by a served one."""
    options: dict[str, Any] = {"env_kwargs": dict(package.kwargs)}
    if address is not None:
        name = package.env.partition(":")[2] if package.by_id else "tried"
        return envhub.make_vec(name, NUM_ENVS, hub=address, **options)
    name = package.env if package.by_id else f"factories:{package.env}"
    return envhub.make_vec(name, NUM_ENVS, vector=package.vector, python=python if package.apart else None, **options)


def actions_for(space: Any) -> list[Any]:
    """Batches of actions of this space, the same in every run."""
    space.seed(3)
    return [_batch(space) for _ in range(STEPS)]


def _batch(space: Any) -> Any:
    sampled = [space.sample() for _ in range(NUM_ENVS)]
    return gymnasium.vector.utils.concatenate(
        space, sampled, gymnasium.vector.utils.create_empty_array(space, NUM_ENVS)
    )


def compared(found: list[Record], wanted: list[Any]) -> str:
    """``equal``, or where a session differs from the plain loop."""
    for env, record in enumerate(wanted):
        if not isinstance(record, list):
            return f"runs; no plain loop: {record}"[:300]
        for step, (one, other) in enumerate(zip(found[env], record, strict=True)):
            if place := difference(one, other, "observation" if step == 0 else "result"):
                return f"differs in step {step} of env {env}: {place}"
    return "equal"


class Attempt:
    """The sessions of one package, each with the actions of the first."""

    def __init__(self, package: Package, python: str) -> None:
        self.package = package
        self.python = python
        self.actions: list[Any] = []
        self.wanted: list[Any] = []

    def outcome(self, address: str | None) -> str:
        """What a session was like, or what it raised."""
        try:
            envs = made(self.package, self.python, address)
            self.actions = self.actions or actions_for(envs.single_action_space)
            found = record_of_hub(envs, self.actions)
            self.wanted = self.wanted or wanted_records(self.package, self.python, self.actions)
            return compared(found, self.wanted)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def main(name: str, python: str) -> None:
    """Try the package of this name, with this Python."""
    attempt = Attempt(next(each for each in PACKAGES if each.name == name), python)
    found = {way: attempt.outcome(None) for way in ("private", "private again")}
    with served(attempt.package, python) as address:
        found.update({way: attempt.outcome(address) for way in ("tcp", "tcp again")})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
