"""Runs in the environment of a package: ``python attempt.py PACKAGE`` steps its env directly and by hubs, and compares.

What it prints last is a line of JSON with what was found on each way.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import factories
import gymnasium
import numpy as np
from packages import PACKAGES, VARIABLES, Package

import envhub

NUM_ENVS, STEPS, SEED = 2, 40, 7
Record = list[Any]


def factory_of(package: Package) -> Callable[..., Any]:
    """What makes one env, or the vector env, of this package."""
    if package.by_id:
        return functools.partial(gymnasium.make, package.env, **dict(package.kwargs))
    return functools.partial(getattr(factories, package.env), **dict(package.kwargs))


def plain(value: Any) -> Any:
    """The value as nested dicts and tuples of NumPy arrays, of whichever library it is."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in sorted(value.items(), key=str)}
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    return value if isinstance(value, str) else np.array(value)


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
    same = one.shape == other.shape and np.array_equal(one, other, equal_nan=other.dtype.kind == "f")
    return "" if same else where


def row(batch: Any, env: int) -> Any:
    """One env's part of a batch."""
    if isinstance(batch, dict):
        return {key: row(part, env) for key, part in batch.items()}
    if isinstance(batch, tuple) and not (batch and isinstance(batch[0], str)):
        return tuple(row(part, env) for part in batch)
    return batch[env]


def record_of_hub(envs: Any, actions: list[Any]) -> Record:
    """What a vector env of EnvHub gives, for each env; it is closed."""
    try:
        found = [envs.reset(seed=SEED)[0], *(envs.step(action)[:4] for action in actions)]
        return [[plain(row(one, env)) for one in found] for env in range(NUM_ENVS)]
    finally:
        envs.close()


def record_directly(package: Package, env: int, actions: list[Any]) -> Record:
    """What an env gives in a plain loop, in which it is reset in the step after the end of its episode."""
    made = factories.looped(factory_of(package)(), package.kind)
    found, ended = [plain(made.reset(SEED + env))], False  # copies: some envs observe by one array
    for action in actions:
        if ended:
            found.append(plain((made.reset(None), 0.0, False, False)))
            ended = False
        else:
            found.append(plain(made.step(row(action, env))))
            ended = bool(found[-1][2] or found[-1][3])
    return found


def _in_child(pipe: Any, package: Package, env: int, actions: list[Any]) -> None:
    try:
        pipe.send(record_directly(package, env, actions))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(error if isinstance(error, Exception) else repr(error))


def wanted_records(package: Package, actions: list[Any]) -> list[Record]:
    """What each env gives directly, each in a process of its own; of a vector env, what that gives."""
    if package.vector:
        records = factories.vector_records(package, factory_of(package), NUM_ENVS, SEED, actions)
        return [[plain(one) for one in record] for record in records]
    found = []
    for env in range(NUM_ENVS):
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        child = context.Process(target=_in_child, args=(far, package, env, actions))
        child.start()
        far.close()
        try:
            found.append(near.recv())
        except EOFError:
            found.append(RuntimeError("the process of a plain loop ended"))
        child.join()
    return found


@contextlib.contextmanager
def served(package: Package) -> Iterator[str]:
    """A hub that offers the env; the context's value is its address."""
    entry = package.env if package.by_id else f"tried=factories:{package.env}"
    program = [sys.executable, "-m", "envhub", "serve", entry, "--bind", "tcp://127.0.0.1:0"]
    program += ["--vector"] if package.vector else []
    program += [part for name in VARIABLES for part in ("--worker-env", name)]
    hub = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert hub.stdout is not None
    try:
        yield hub.stdout.readline().split()[-1]
    finally:
        hub.terminate()
        hub.wait(60)


def made(package: Package, address: str | None) -> Any:
    """A vector env over a private hub, or by a served one."""
    options: dict[str, Any] = {"env_kwargs": dict(package.kwargs), "autoreset_mode": package.mode}
    if address is not None:
        name = package.env.partition(":")[2] if package.by_id else "tried"
        return envhub.make_vec(name, NUM_ENVS, hub=address, **options)
    name = package.env if package.by_id else f"factories:{package.env}"
    return envhub.make_vec(name, NUM_ENVS, vector=package.vector, **options)


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
            return f"runs; no plain loop: {record!r}"[:300]
        for step, (one, other) in enumerate(zip(found[env], record, strict=True)):
            if place := difference(one, other, "observation" if step == 0 else "result"):
                return f"differs in step {step} of env {env}: {place}"
    return "equal"


class Attempt:
    """The sessions of one package, each with the actions of the first."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.actions: list[Any] = []
        self.wanted: list[Any] = []

    def outcome(self, address: str | None) -> str:
        """What a session was like, or what it raised."""
        try:
            envs = made(self.package, address)
            self.actions = self.actions or actions_for(envs.single_action_space)
            found = record_of_hub(envs, self.actions)
            self.wanted = self.wanted or wanted_records(self.package, self.actions)
            return compared(found, self.wanted)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def main(name: str) -> None:
    """Try the package of this name."""
    attempt = Attempt(next(each for each in PACKAGES if each.name == name))
    found = {way: attempt.outcome(None) for way in ("private", "private again")}
    with served(attempt.package) as address:
        found.update({way: attempt.outcome(address) for way in ("tcp", "tcp again")})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
