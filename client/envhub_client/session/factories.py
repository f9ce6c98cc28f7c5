"""The factories of envs: checked before a worker is started for them, and packed for the private hub."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from gymnasium import Env
from gymnasium.vector import VectorEnv

from envhub.protocol.messages import Make
from envhub.values import code_pickler
from envhub.values.gym_api import unfit
from envhub_client.session.factory_digest import factories_digest

Factory = Callable[[], Env[Any, Any]]


def checked_factories(given: Any) -> list[Factory]:
    """The factories in a list or other iterable, one per env.

    Raises:
        TypeError: it is none, or one of them is no factory, such as an env that is made already.
        ValueError: there is none in it.
    """
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


def _described(given: Any) -> str:
    if callable(given):
        return "a single factory"
    if hasattr(given, "reset") and hasattr(given, "step"):
        return unfit(given) or f"an env that is made already, {given!r}"
    return repr(given)


def make_of_factories(factories: Sequence[object], runner: object = None) -> Make:
    """What asks a private hub for one env of each factory, run by this class, or the one of this name.

    Raises:
        TypeError: the factories hold something that cannot be pickled.
    """
    try:
        pickled = code_pickler.dumps(list(factories))
        pickled_runner = b"" if runner is None else code_pickler.dumps(runner)
    except Exception as error:  # whatever a foreign object raises when it is pickled
        raise TypeError(f"the factories of the envs cannot be pickled for the workers: {error}") from error
    alike = all(factory is factories[0] for factory in factories)
    digest = factories_digest(factories, runner)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked = Make(len(factories), factories=pickled, runner=pickled_runner, factories_digest=digest, alike=alike)
    return replace(asked, python=version)
