"""Runs in the Python of a package: ``python plain_loop.py PACKAGE ENV`` steps one of its envs without a hub.

It reads pickled batches of actions from its standard input, and writes the pickled record of the env with this number
to its standard output; of a vector env, the records of all. The package's Python may be 3.8, and needs no EnvHub.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import factories
import numpy as np
from packages import PACKAGES, Package

NUM_ENVS, SEED = 2, 7
OLD_NUMPY = np.__version__.startswith("1.")


def factory_of(package: Package) -> Callable[..., Any]:
    """What makes one env, or the vector env, of this package."""
    if not package.by_id:
        return functools.partial(getattr(factories, package.env), **dict(package.kwargs))
    api = importlib.import_module("gym" if package.kind.startswith("gym ") else "gymnasium")
    return functools.partial(api.make, package.env, **dict(package.kwargs))


def plain(value: Any) -> Any:
    """The value as nested dicts and tuples of NumPy arrays, of whichever library it is."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in sorted(value.items(), key=str)}
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    return value if isinstance(value, str) else np.array(value)


def row(batch: Any, env: int) -> Any:
    """One env's part of a batch."""
    if isinstance(batch, dict):
        return {key: row(part, env) for key, part in batch.items()}
    if isinstance(batch, tuple) and not (batch and isinstance(batch[0], str)):
        return tuple(row(part, env) for part in batch)
    return batch[env]


def record(package: Package, env: int, actions: list[Any]) -> list[Any]:
    """What an env gives in a plain loop, in which it is reset in the step after the end of its episode."""
    made = factories.looped(factory_of(package)(), package.kind)
    found, ended = [plain(made.reset(SEED + env))], False  # copies: some envs observe by one array
    for action in actions:
        if ended:
            found.append(plain((made.reset(None), np.zeros_like(found[-1][1]), False, False)))
            ended = False
        else:
            observation, reward, *flags = made.step(row(action, env))
            found.append(plain((observation, np.asarray(reward, np.float64), *flags)))
            ended = any(flags)
    return found


class Actions(pickle.Unpickler):
    """Reads what a newer NumPy has pickled, too."""

    def find_class(self, module: str, name: str) -> Any:
        """A name of a module, which may be the newer name of one."""
        return super().find_class(module.replace("numpy._core", "numpy.core") if OLD_NUMPY else module, name)


def main(name: str, env: int) -> None:
    """Step the env of this package."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # for what the package prints
    package = next(each for each in PACKAGES if each.name == name)
    actions = Actions(sys.stdin.buffer).load()
    if package.vector:
        records = factories.vector_records(package, factory_of(package), NUM_ENVS, SEED, actions)
        found = [[plain(one) for one in each] for each in records]
    else:
        found = record(package, env, actions)
    with output:
        pickle.dump(found, output, 4)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
