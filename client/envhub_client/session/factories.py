"""The factories of envs: checked before a worker is started for them, and packed for the private hub."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from gymnasium import Env
from gymnasium.vector import VectorEnv

from envhub.protocol.messages import Make, append_offsets
from envhub.values import pickling
from envhub.values.gym_api import why_not_env
from envhub.values.pickling import why_unpicklable

ALONE_BYTES_MIN = 1 << 20  # of all factories together; fewer bytes may as well go to each worker
SHARED_MIN = 0.75  # of the list, pickled for each of them: if each factory by itself has more, they share their data

Factory = Callable[[], Env[Any, Any]]


def checked_factories(given: object) -> list[Factory]:
    """The factories in a list or other iterable, one per env."""
    if callable(given) or isinstance(given, (str, Env, VectorEnv)) or not isinstance(given, Iterable):
        raise TypeError(
            f'factories of envs are wanted, such as [lambda: gym.make("CartPole-v1")] * 4; got {_described(given)}'
        )
    factories = list(given)
    if not factories:
        raise ValueError("there is no factory in the list: it has one for each env")
    for number, factory in enumerate(factories):
        if not callable(factory):
            raise TypeError(
                f'factory {number} cannot be called: a factory such as lambda: gym.make("CartPole-v1") makes an env in '
                f"a worker; got {_described(factory)}"
            )
    return factories


def _described(given: object) -> str:
    if callable(given):
        return "a single factory"
    if hasattr(given, "reset") and hasattr(given, "step"):
        return why_not_env(given) or f"an env that is made already, {given!r}"
    return repr(given)


def make_of_factories(factories: Sequence[object], runner: object = None) -> Make:
    """Request to a private hub for one env of each factory, run by this class, or the one of this name."""
    try:
        pickled = _pickled(factories)
    except Exception as error:  # whatever a foreign object raises when it is pickled
        raise TypeError(
            f"the factories of the envs cannot be pickled for the workers: {_why(factories, error)}"
        ) from error
    pickled_runner = b"" if runner is None else pickled_for_workers("worker", runner)
    alike = all(factory is factories[0] for factory in factories)
    # By its first factory the hub knows an env that it has made before.
    known_by = pickling.dumps(factories[0]) + pickled_runner if len(pickled) < ALONE_BYTES_MIN else b""
    digest = hashlib.sha256(known_by).hexdigest() if known_by else ""
    asked = Make(len(factories), factories=pickled, runner=pickled_runner, factories_digest=digest, alike=alike)
    return replace(asked, python=own_python())


def own_python() -> str:
    """The version of this Python, such as 3.12: code that is pickled by value runs on no other."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def pickled_for_workers(named: str, value: object) -> bytes:
    """The pickle of a value of the program, which workers load; an error names the part that cannot be pickled."""
    try:
        return pickling.dumps(value)
    except Exception as error:  # as above
        raise TypeError(why_unpicklable(named, value, error)) from error


def _why(factories: Sequence[object], error: Exception) -> str:
    for number, factory in enumerate(factories):
        try:
            pickling.dumps(factory)
        except Exception as own:  # as above
            return why_unpicklable(f"factory {number}", factory, own)
    return str(error)


def _pickled(factories: Sequence[object]) -> bytes:
    """The list, pickled, or the pickle of each factory and its place, unless they are small or share their data."""
    whole = pickling.dumps(list(factories))
    different = {id(factory): factory for factory in factories}
    if len(whole) < ALONE_BYTES_MIN or len(different) == 1:
        return whole
    pickles, offsets, at = [], {}, 0
    for key, factory in different.items():
        pickles.append(pickling.dumps(factory))
        offsets[key] = at, at + len(pickles[-1])
        at = offsets[key][1]
        if at > len(whole) * len(different) * SHARED_MIN:
            return whole
    return append_offsets(b"".join(pickles), (offsets[id(factory)] for factory in factories))
