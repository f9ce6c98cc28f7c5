"""Checks of arguments: values that are none, keywords that no function takes, and the ones that were meant."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import gymnasium

from envhub.action_chunk import ActionChunk
from envhub.errors import brief, meant

Options = TypeVar("Options")

# Keywords of gymnasium.make_vec that a program may still pass.
_GYMNASIUMS = {
    "vectorization_mode": "leave it out: envs are always hosted in processes of their own.",
    "vector_kwargs": "pass what is in it as keywords of make_vec.",
}

# How Python says it of functions written in Python, and of those written in C.
_REFUSED = re.compile(r"got an unexpected keyword argument '(\w+)'|'(\w+)' is an invalid keyword argument")


def check(is_right: bool, name: str, wanted: str, value: object, error: type[Exception] = ValueError) -> None:
    """Refuse this value of an argument unless it is right; the text says what is wanted."""
    if not is_right:
        raise error(f"{name} must be {wanted}, got {brief(value)}")


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Refuse a value that is none of these."""
    *others, last = map(repr, choices)
    check(value in choices, name, f"{', '.join(others)} or {last}", value)


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """The value as an int, also of a number of NumPy; ``TypeError`` for any other, ``ValueError`` below ``least``."""
    number = None
    with contextlib.suppress(TypeError):
        number = operator.index(value)
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {brief(value)}")
    check(least is None or number >= least, name, f"at least {least}", number)
    return number


def fields_of(kind: type[Options], arguments: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The options of this dataclass among these keyword arguments, and the others."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    options = {name: value for name, value in arguments.items() if name in names}
    return kind(**options), {name: value for name, value in arguments.items() if name not in names}


def refused_keyword(error: TypeError, given: Collection[str]) -> str:
    """The one of the given keywords that was refused by what raised this; empty where it says something else."""
    match = _REFUSED.search(str(error))
    name = match[1] or match[2] if match else ""
    return name if name in given else ""


def hint_of(name: str, keywords: Iterable[str]) -> str:
    """A hint for a keyword that no function takes: the known one that is close to it; empty where none is."""
    return f"; {_GYMNASIUMS[name]}" if name in _GYMNASIUMS else meant(name, keywords)


WrapperLike = str | type | functools.partial[Any] | tuple[Any, dict[str, Any]]


def named_wrappers(wrappers: Sequence[WrapperLike]) -> tuple[list[str], list[dict[str, Any]]]:
    """The entry points, as ``module:Class``, and the keyword arguments of these wrappers."""
    if isinstance(wrappers, str) or not isinstance(wrappers, Sequence):
        raise TypeError(f"wrappers must be a list, such as [{_text(wrappers)}], got {brief(wrappers, 100)}")
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
        kind = ActionChunk if kind == "ActionChunk" else getattr(gymnasium.wrappers, kind, kind)
    if not (isinstance(kind, type) and issubclass(kind, gymnasium.Wrapper)):
        raise TypeError(
            f"{brief(wrapper, 100)} is no wrapper that can be named: give a class that extends gymnasium.Wrapper, the "
            "name of one in gymnasium.wrappers, 'ActionChunk', or (class, {...}) with its arguments; or use a factory"
        )
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise TypeError(
            f"the workers cannot import the wrapper {_text(kind)}: wrap in a factory, which travels by value"
        )
    return f"{kind.__module__}:{kind.__qualname__}", dict(arguments)


def _text(kind: object) -> str:
    return getattr(kind, "__qualname__", brief(kind))
