"""A digest of what factories make: equal in every run of a program, as far as their code and its values are.

It is only a key under which a hub keeps what steps of such envs took. Pickles do not serve for that: those of lambdas
and of a program's own classes differ from run to run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

TOKENS_MAX = 10_000  # of one factory
DEPTH_MAX = 12
DIFFERENT = "(differs from env to env)"

_VALUES = (str, bytes, int, float, complex, bool, type(None))


def factories_digest(factories: Sequence[object]) -> str:
    """A digest of the code of the factories and of the values it uses, but for those in which the factories differ.

    An env's number, or a seed made from it, is in every factory another one, and says nothing of what a step takes.
    """
    first, *others = (list(islice(_tokens(factory, 0, set()), TOKENS_MAX)) for factory in dict.fromkeys(factories))
    for other in others:
        first = [a if a == b else DIFFERENT for a, b in zip_longest(first, other)]
    return hashlib.sha256("\0".join(first).encode("utf-8", "surrogatepass")).hexdigest()


def _tokens(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """What there is to say of a value, piece by piece."""
    if isinstance(value, _VALUES):
        yield f"{type(value).__name__} {value!r}"
        return
    if depth > DEPTH_MAX or id(value) in seen:
        return
    seen.add(id(value))
    yield _name(value)
    for part in _parts(value):
        yield from _tokens(part, depth + 1, seen)


def _name(value: Any) -> str:
    named = value if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _parts(value: Any) -> Iterator[Any]:
    match value:
        case functools.partial():
            yield from (value.func, value.args, value.keywords)
        case types.MethodType():
            yield from (value.__func__, value.__self__)
        case types.FunctionType():
            # Of an installed package's function its name says all.
            if _is_programs_own(value):
                yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
                yield from _captured(value)
        case types.CodeType():
            yield from (value.co_code, value.co_names, value.co_consts)
        case type():
            if _is_programs_own(value):
                yield from (member for _, member in sorted(vars(value).items()) if callable(member))
                yield from value.__bases__
        case Mapping():
            for key in sorted(value, key=repr):
                yield from (key, value[key])
        case list() | tuple():
            yield from value
        case set() | frozenset():
            yield from sorted(map(repr, value))
        case _ if dataclasses.is_dataclass(value):
            yield from (getattr(value, field.name) for field in dataclasses.fields(value))
        case _ if callable(value):  # a factory of a class of its own
            yield from (type(value), vars(value) if hasattr(value, "__dict__") else None)


def _captured(function: types.FunctionType) -> Iterator[Any]:
    """The values of other scopes that a function uses."""
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # a cell is still empty
        return
    for scope in (found.nonlocals, found.globals):
        for _, value in sorted(scope.items()):
            if not isinstance(value, types.ModuleType):
                yield value


def _is_programs_own(value: Any) -> bool:
    """Whether it is likely to change from day to day: what stands in the program's main module."""
    return bool(value.__module__ == "__main__" or "<locals>" in value.__qualname__ or "<lambda>" in value.__qualname__)
