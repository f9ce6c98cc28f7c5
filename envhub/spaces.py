"""Gymnasium spaces: their wire form, their fixed-size leaves, and values taken apart into leaves and put together.

One registered function per space and purpose, as in ``gymnasium.vector.utils``. Only Gymnasium's own classes are
accepted, exactly: a subclass may mean something else by the same fields.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any, Callable, Dict, Iterator

import numpy as np
from gymnasium import spaces as gym_spaces

from envhub.errors import UnsupportedSpace
from envhub.layout import Leaf

Description = Dict[str, Any]


def describe(space: Any) -> Description:
    """The space as codec values, from which ``build`` makes an equal one.

    Raises:
        UnsupportedSpace: the space, or one inside it, has no wire form.
    """
    name = type(space).__name__
    if type(space) is not getattr(gym_spaces, name, None) or name not in _DESCRIBE:
        raise UnsupportedSpace(
            f"{type(space).__module__}.{name} has no place in an arena; Box, Discrete, MultiDiscrete, MultiBinary and "
            "any nesting of them in Dict and Tuple have: wrap the env so that it uses those"
        )
    return {"space": name, **_DESCRIBE[name](space)}


def build(description: Description) -> Any:
    """The space that ``describe`` described.

    Raises:
        UnsupportedSpace: an unknown kind of space, or fields that make no space.
    """
    fields = dict(description)
    name = fields.pop("space", None)
    if not isinstance(name, str) or name not in _BUILD:
        raise UnsupportedSpace(f"this version of EnvHub knows no space {name!r}")
    try:
        return _BUILD[name](**fields)
    except UnsupportedSpace:
        raise
    except (
        Exception
    ) as error:  # the fields came over the wire: whatever a constructor makes of them is the wire's fault
        raise UnsupportedSpace(f"malformed description of a {name}: {error}") from error


def _describe_bound(bound: np.ndarray) -> Any:
    # A bound is mostly one value: an image's 28,224 zeros need not travel.
    first = bound.flat[0] if bound.size else None
    same = first is not None and bool(np.array_equal(bound, np.full_like(bound, first)))
    return np.full((), first, bound.dtype) if same else bound


def _build_box(dtype: str, shape: list[int], low: np.ndarray, high: np.ndarray) -> Any:
    low, high = (np.broadcast_to(bound, shape).astype(dtype) for bound in (low, high))
    return gym_spaces.Box(low, high, tuple(shape), np.dtype(dtype))


def _describe_dict(space: gym_spaces.Dict) -> Description:
    return {
        "keys": list(space.spaces),
        "spaces": [describe(sub) for sub in space.spaces.values()],
        "sort_keys": bool(getattr(space, "sort_keys", False)),
    }


def _build_dict(keys: list[str], spaces: list[Description], sort_keys: bool = False) -> Any:
    # A list of pairs keeps the order; versions that know sort_keys need it for equal spaces to compare equal.
    built = gym_spaces.Dict([(key, build(sub)) for key, sub in zip(keys, spaces)])
    if hasattr(built, "sort_keys"):
        built.sort_keys = sort_keys
    return built


_DESCRIBE: dict[str, Callable[[Any], Description]] = {
    "Box": lambda s: {
        "dtype": s.dtype.str,
        "shape": list(s.shape),
        "low": _describe_bound(s.low),
        "high": _describe_bound(s.high),
    },
    "Discrete": lambda s: {"n": int(s.n), "start": int(s.start), "dtype": s.dtype.str},
    "MultiDiscrete": lambda s: {"nvec": s.nvec, "start": s.start, "dtype": s.dtype.str},
    "MultiBinary": lambda s: {"n": list(s.shape), "flat": isinstance(s.n, (int, np.integer))},
    "Dict": _describe_dict,
    "Tuple": lambda s: {"spaces": [describe(sub) for sub in s.spaces]},
}


def _build_discrete(n: int, start: int, dtype: str) -> Any:
    kind = np.dtype(dtype)
    if kind == np.int64:  # the only dtype that Gymnasium before 1.2 knows
        return gym_spaces.Discrete(n, start=start)
    return gym_spaces.Discrete(n, start=start, dtype=kind.type)


_BUILD: dict[str, Callable[..., Any]] = {
    "Box": _build_box,
    "Discrete": _build_discrete,
    "MultiDiscrete": lambda nvec, start, dtype: gym_spaces.MultiDiscrete(nvec, dtype=np.dtype(dtype).type, start=start),
    "MultiBinary": lambda n, flat: gym_spaces.MultiBinary(n[0] if flat else n),
    "Dict": _build_dict,
    "Tuple": lambda spaces: gym_spaces.Tuple([build(sub) for sub in spaces]),
}


@singledispatch
def leaves(space: Any) -> list[Leaf]:
    """The fixed-size parts of a space, in the order of the space."""
    raise UnsupportedSpace(f"{type(space).__name__} has no fixed-size layout")


@leaves.register(gym_spaces.Box)
@leaves.register(gym_spaces.Discrete)
@leaves.register(gym_spaces.MultiDiscrete)
@leaves.register(gym_spaces.MultiBinary)
def _leaves_array(space: Any) -> list[Leaf]:
    return [Leaf(space.dtype.str, tuple(space.shape))]


@leaves.register(gym_spaces.Dict)
def _leaves_dict(space: Any) -> list[Leaf]:
    return [leaf for sub in space.spaces.values() for leaf in leaves(sub)]


@leaves.register(gym_spaces.Tuple)
def _leaves_tuple(space: Any) -> list[Leaf]:
    return [leaf for sub in space.spaces for leaf in leaves(sub)]


@singledispatch
def flatten(space: Any, value: Any) -> list[Any]:
    """The parts of ``value`` in the order of the space's leaves.

    ``value`` is an element of ``space``, or a batch of its elements as Gymnasium batches them: both nest alike.

    Raises:
        KeyError, TypeError, ValueError: ``value`` does not nest as the space does.
    """
    return [value]


@flatten.register(gym_spaces.Dict)
def _flatten_dict(space: Any, value: Any) -> list[Any]:
    return [part for key, sub in space.spaces.items() for part in flatten(sub, value[key])]


@flatten.register(gym_spaces.Tuple)
def _flatten_tuple(space: Any, value: Any) -> list[Any]:
    if len(value) != len(space.spaces):
        raise ValueError(f"a tuple of {len(value)} where the space has {len(space.spaces)} parts")
    return [part for sub, item in zip(space.spaces, value) for part in flatten(sub, item)]


def assemble(space: Any, parts: Iterator[Any]) -> Any:
    """The nested value (dicts and tuples) whose leaves are the next of ``parts``; undoes ``flatten``."""
    if isinstance(space, gym_spaces.Dict):
        return {key: assemble(sub, parts) for key, sub in space.spaces.items()}
    if isinstance(space, gym_spaces.Tuple):
        return tuple(assemble(sub, parts) for sub in space.spaces)
    return next(parts)


def is_flat(space: Any) -> bool:
    """Whether the space is a single leaf, so that values need no taking apart."""
    return not isinstance(space, (gym_spaces.Dict, gym_spaces.Tuple))


def check_leaves(found: list[Leaf], wanted: tuple[Leaf, ...], what: str) -> None:
    """Refuse a space whose leaves are not the session's.

    Raises:
        UnsupportedSpace: naming the first difference.
    """
    if tuple(found) != wanted:
        raise UnsupportedSpace(f"{what} leaves {found} differ from the session's {list(wanted)}")
