"""Wrappers of single envs as a request for envs by name has them: an entry point and arguments each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gymnasium

from envhub.errors import shown

WrapperLike = str | type | functools.partial[Any] | tuple[Any, dict[str, Any]]


def named_wrappers(wrappers: Sequence[WrapperLike]) -> tuple[list[str], list[dict[str, Any]]]:
    """The entry points, as ``module:Class``, and the keyword arguments of these wrappers.

    Args:
        wrappers: each a class, the name of one of Gymnasium's, either of these in a pair with a dict of arguments, or a
            ``functools.partial`` of a class with keyword arguments.

    Raises:
        TypeError: one of them is none of these.
    """
    if isinstance(wrappers, (str, type)) or not isinstance(wrappers, Sequence):
        raise TypeError(f"wrappers must be a list, such as [{_text(wrappers)}], got {shown(wrappers, 100)}")
    each = [_named(wrapper) for wrapper in wrappers]
    return [entry for entry, _ in each], [arguments for _, arguments in each]


def _named(wrapper: object) -> tuple[str, dict[str, Any]]:
    kind, arguments = wrapper, {}
    if isinstance(wrapper, functools.partial):
        kind, arguments = wrapper.func, wrapper.keywords
        if wrapper.args:
            raise TypeError(f"the arguments of the wrapper {_text(kind)} must have names, such as stack_size=4")
    elif isinstance(wrapper, tuple) and len(wrapper) == 2 and isinstance(wrapper[1], dict):
        kind, arguments = wrapper
    if isinstance(kind, str):
        kind = getattr(gymnasium.wrappers, kind, kind)
    if not (isinstance(kind, type) and issubclass(kind, gymnasium.Wrapper)):
        raise TypeError(
            f"{shown(wrapper, 100)} is no wrapper that can be named: give a class that extends gymnasium.Wrapper, the "
            "name of one in gymnasium.wrappers, or (class, {...}) with its arguments; or wrap in a factory"
        )
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise TypeError(
            f"the workers cannot import the wrapper {_text(kind)}: wrap in a factory, which travels by value"
        )
    return f"{kind.__module__}:{kind.__qualname__}", dict(arguments)


def _text(kind: object) -> str:
    return getattr(kind, "__qualname__", shown(kind))
