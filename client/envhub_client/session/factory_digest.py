"""A digest of what factories make: equal in every run of a program, as far as their code and its values are.

It is only a key under which a hub keeps what steps of such envs took. Pickles do not serve for that: those of lambdas
and of a program's own classes differ from run to run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

import gymnasium

TOKENS_MAX = 10_000  # of one factory
FACTORIES_MAX = 16  # that are read
DEPTH_MAX = 12
VALUE_CHARACTERS_MAX = 1000  # of a text or of bytes; of a longer one its beginning and length count
ITEMS_MAX = 1000  # of a container; of a larger one its length counts
DIFFERENT = "(differs from env to env)"

_NUMBERS = (int, float, complex, bool, type(None))


def factories_digest(factories: Sequence[object], *others: object) -> str:
    """A digest of the code of the factories and of the values it uses, but for those in which the factories differ.

    An env's number, or a seed made from it, is in every factory another one, and says nothing of what a step takes.
    ``others`` are what else makes a step, such as the class that runs each env. The digest is hexadecimal digits, and
    empty where an object of the program cannot be read.
    """
    # Each once, and of many only the first: as a rule they differ in the same values.
    different = list({id(factory): factory for factory in factories}.values())[:FACTORIES_MAX]
    try:
        first, *rest = (list(islice(_tokens(each, 0, set()), TOKENS_MAX)) for each in different)
        for tokens in rest:
            first = [a if a == b else DIFFERENT for a, b in zip_longest(first, tokens)]
        first += islice(_tokens(others, 0, set()), TOKENS_MAX)
    except Exception:  # of a foreign __repr__ or __getitem__, say; without a digest nothing is known of the env
        return ""
    return hashlib.sha256("\0".join(first).encode("utf-8", "surrogatepass")).hexdigest()


def _tokens(value: object, depth: int, seen: set[int]) -> Iterator[str]:
    """Text of a value, piece by piece."""
    if isinstance(value, _NUMBERS):
        yield f"{type(value).__name__} {value!r}"
        return
    if isinstance(value, (str, bytes)):
        yield f"{type(value).__name__} {len(value)} {value[:VALUE_CHARACTERS_MAX]!r}"
        return
    if depth > DEPTH_MAX or id(value) in seen:
        return
    seen.add(id(value))
    yield _name(value)
    if isinstance(value, (Mapping, list, tuple, set, frozenset)) and len(value) > ITEMS_MAX:
        yield f"{len(value)} items"
        return
    for part in _parts(value):
        yield from _tokens(part, depth + 1, seen)


def _name(value: object) -> str:
    named = value if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _parts(value: object) -> Iterator[Any]:
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
        case types.SimpleNamespace() | argparse.Namespace():  # a program's options
            yield vars(value)
        case _ if callable(value) or _is_programs_own(type(value)):  # a factory, or options, of a class of its own
            yield from (type(value), vars(value) if hasattr(value, "__dict__") else None)


def _captured(function: types.FunctionType) -> Iterator[Any]:
    """The values of other scopes that a function uses.

    Besides the id of an env other texts do not count: many programs name each run by the time, and its folders by that.
    """
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a cell is still empty
        return
    values = [value for scope in (variables.nonlocals, variables.globals) for _, value in sorted(scope.items())]
    texts = [value for value in values if isinstance(value, str)]
    ids = [text for text in texts if text.rpartition(":")[2] in gymnasium.registry]
    for value in values:
        if not isinstance(value, (types.ModuleType, str)):
            yield value
    yield from ids or texts


def _is_programs_own(value: Any) -> bool:
    """True if it is likely to change from day to day: what is in the program's main module."""
    return bool(value.__module__ == "__main__" or "<locals>" in value.__qualname__ or "<lambda>" in value.__qualname__)
