"""The factories of envs, checked before a worker is started for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gymnasium import Env
from gymnasium.vector import VectorEnv

from envhub.values.gym_api import unfit

Factory = Callable[[], Env[Any, Any]]


def checked_factories(given: Any) -> list[Factory]:
    """The factories in a list or other iterable, one per env.

    Raises:
        TypeError: it is none, or one of them is no factory, such as an env that is made already.
    """
    if callable(given) or isinstance(given, (str, Env, VectorEnv)) or not isinstance(given, Iterable):
        raise TypeError(
            f'factories of envs are wanted, such as [lambda: gym.make("CartPole-v1")] * 4; got {_described(given)}'
        )
    factories = list(given)
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
