"""The factories of envs: checked before a worker is started for them, and packed for the private hub."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any

import gymnasium
from gymnasium import Env
from gymnasium.vector import VectorEnv

from envhub.protocol.messages import Make, with_places
from envhub.values import pickling
from envhub.values.gym_api import unfit
from envhub.values.pickling import why_unpicklable

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


ALONE_BYTES_MIN = 1 << 20  # of all factories together; fewer bytes may as well go to each worker
SHARED_MIN = 0.75  # of the list, pickled for each of them: if each factory alone has more, they share their data

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
        return unfit(given) or f"an env that is made already, {given!r}"
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
    digest = factories_digest(factories, runner)
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
        raise TypeError(why_unpicklable(named, value, pickling.dumps, error)) from error


def _why(factories: Sequence[object], error: Exception) -> str:
    for number, factory in enumerate(factories):
        try:
            pickling.dumps(factory)
        except Exception as own:  # as above
            return why_unpicklable(f"factory {number}", factory, pickling.dumps, own)
    return str(error)


def _pickled(factories: Sequence[object]) -> bytes:
    """The list of factories, pickled, with the places of each factory alone.

    There are no places where all factories together are small, or share their data: as one list, what they share
    is pickled once.
    """
    whole = pickling.dumps(list(factories))
    different = {id(factory): factory for factory in factories}
    if len(whole) < ALONE_BYTES_MIN or len(different) == 1:
        return whole
    left, alone = len(whole) * len(different) * SHARED_MIN, {}
    for key, factory in different.items():
        alone[key] = pickling.dumps(factory)
        left -= len(alone[key])
        if left < 0:
            return whole
    return _joined([id(factory) for factory in factories], alone)


def _joined(keys: Sequence[int], alone: Mapping[int, bytes]) -> bytes:
    """One pickle that loads the pickles of these keys as a list, and their places in it."""
    pieces, at = [b"\x80\x04]("], 4  # protocol 4, an empty list, and the mark before its items
    places: dict[int, tuple[int, int]] = {}
    for key in keys:
        if key in places:  # MEMOIZE, below, has numbered it
            pieces.append(b"j" + [*places].index(key).to_bytes(4, "little"))
        else:
            head = b"cpickle\nloads\n\x8e" + len(alone[key]).to_bytes(8, "little")
            pieces += [head, alone[key], b"\x85R\x94"]  # called with these bytes, and memoized
            places[key] = at + len(head), at + len(head) + len(alone[key])
        at = at + len(pieces[-1]) if pieces[-1][:1] == b"j" else places[key][1] + 3
    return with_places(b"".join([*pieces, b"e."]), (places[key] for key in keys))
