"""Gymnasium spaces: their wire form, their leaves, and values split into leaves and assembled again.

A leaf is a part of a space that is neither Dict nor Tuple: a fixed-size array for Box, Discrete, MultiDiscrete and
MultiBinary, and an ``OBJECT`` of variable size for every other space.

Only Gymnasium's own classes have a wire form. Any other space travels as the nearest of these: a subclass as the class
that it extends, an object with the fields of a space as that space, and any other by its samples. Between a program
and the workers of its own private hub such a space travels by cloudpickle.
"""

from __future__ import annotations

import contextlib
import copy
import math
import string
from typing import Any, Callable, Collection, Dict, Iterator, Mapping

import numpy as np

from envhub.errors import UnsupportedSpace, printable
from envhub.values.gym_api import api, is_like_space
from envhub.values.leaf import ANYTHING, OBJECT, Leaf

gym_spaces = api.spaces

Description = Dict[str, Any]
Describe = Callable[[Any], Description]
Build = Callable[[Description], Any]

PICKLED = "Pickled"
SPACE_BYTES_MAX = 1 << 30  # of one element; its parts travel as frames
SPACES_MAX = 1 << 12  # nested in a space, including itself
SAMPLES = 3  # by which a space of an unknown class is described
TEXT_CHARS = 1 << 12  # longest text of a space that is described by samples
CHECKED_CHARS = 1 << 15  # at each end of a text; checking all of a long text takes as long as its env's step


class SpacesDiffer(RuntimeError):
    """Envs have spaces that the session's observation mode does not batch together."""


class Anything(gym_spaces.Space):  # type: ignore[misc, name-defined]  # of Gymnasium or of gym
    """The space that contains every value, for envs whose spaces have nothing in common. It has no samples."""

    def contains(self, value: Any) -> bool:
        return True

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        raise NotImplementedError('the envs have spaces of their own, such as get_attr("action_space") returns')

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything)

    def __repr__(self) -> str:
        return "Anything()"


def describe(space: Any, pickled: bool = False, exact: bool = False) -> Description:
    """Describe the space as codec values for ``build``, whose space samples the same; raises ``UnsupportedSpace``.

    A space of a class that is not Gymnasium's is described as the nearest space of Gymnasium, with ``pickled`` left as
    it is for an encoder that pickles it, and with ``exact`` refused.
    """
    if isinstance(space, Anything):
        return dict(ANYTHING)
    name = _nearest_kind(space)
    if not name or not _is_own(space):
        if pickled:
            return {"space": PICKLED, "value": space}
        if exact or not is_like_space(space):
            raise UnsupportedSpace(_refusal(space))
        if not name:
            return describe(_copy_by_samples(space) if isinstance(space, gym_spaces.Space) else _copy_by_fields(space))
    description = {"space": name, **_DESCRIBE[name](space, lambda sub: describe(sub, pickled, exact))}
    random = getattr(space, "_np_random", None)
    if isinstance(random, np.random.Generator):  # the space was seeded or sampled; the copy continues its sequence
        description["random"] = random
    return description


def _is_own(space: Any) -> bool:
    name = type(space).__name__
    return type(space) is getattr(gym_spaces, name, None) or type(space).__module__.startswith("gym.spaces.")


def _nearest_kind(space: Any) -> str:
    bases = (each for each in type(space).__mro__ if each.__module__.startswith(("gymnasium.spaces.", "gym.spaces.")))
    return next((each.__name__ for each in bases if each.__name__ in _DESCRIBE), "")


def _copy_by_fields(space: Any) -> Any:
    """The space of Gymnasium with the object's fields, such as Crafter's named tuples, or with its samples."""
    if hasattr(space, "low") and hasattr(space, "high"):
        bounds = (np.broadcast_to(bound, space.shape).astype(space.dtype) for bound in (space.low, space.high))
        return gym_spaces.Box(*bounds, tuple(space.shape), np.dtype(space.dtype).type)
    if hasattr(space, "nvec"):
        return gym_spaces.MultiDiscrete(space.nvec)
    if hasattr(space, "n"):
        return gym_spaces.Discrete(int(space.n))
    inside = getattr(space, "spaces", None)
    if isinstance(inside, Mapping):
        return gym_spaces.Dict([(key, native(part)) for key, part in inside.items()])
    if inside is not None:
        return gym_spaces.Tuple([native(part) for part in inside])
    return _copy_by_samples(space)


def _copy_by_samples(space: Any) -> Any:
    try:
        copied = copy.deepcopy(space)  # so that the random state of the space itself does not change
        copied.seed(0)  # equal spaces need equal descriptions
        samples = [copied.sample() for _ in range(SAMPLES)]
    except Exception as error:  # a foreign class may raise anything
        raise UnsupportedSpace(f"{_refusal(space)}. It gives no samples: {printable(repr(error))}") from error
    if all(isinstance(sample, str) for sample in samples):
        charset = "".join(sorted({*string.printable, *"".join(samples)}))
        return gym_spaces.Text(max(TEXT_CHARS, *map(len, samples)), min_length=0, charset=charset)
    arrays = [np.asarray(sample) for sample in samples]
    dtype, shape = arrays[0].dtype, arrays[0].shape
    if dtype.kind not in "biuf" or any((each.dtype, each.shape) != (dtype, shape) for each in arrays):
        raise UnsupportedSpace(f"{_refusal(space)}. Its samples are such as {printable(repr(samples[0]))}")
    low, high = (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return gym_spaces.Box(low, high, shape, dtype.type)


def _refusal(space: Any) -> str:
    return (
        f"a {type(space).__module__}.{type(space).__qualname__} has no form on the network, where only Gymnasium's own "
        "spaces have one, those that extend them, and those with texts, numbers or arrays of one shape: wrap the env "
        "so that it uses these, or use a private hub (hub=None)"
    )


def nearest(space: Any, pickled: bool = False) -> Any:
    """The space if it has a wire form, else the space of Gymnasium that it travels as; raises ``UnsupportedSpace``."""
    if isinstance(space, gym_spaces.Space):
        if pickled:
            return space
        with contextlib.suppress(UnsupportedSpace):
            describe(space, exact=True)
            return space
    return build(describe(space))


def build(description: Description, bytes_max: int = SPACE_BYTES_MAX) -> Any:
    """The space of a description, sizes checked first: few bytes may mean a huge one. Raises ``UnsupportedSpace``."""
    try:
        element_bytes = sizes(description)
    except Exception as error:
        raise UnsupportedSpace(printable(f"malformed description of a space: {error}")) from error
    if sum(element_bytes) > bytes_max:
        raise UnsupportedSpace(
            f"a space whose elements have {sum(element_bytes)} bytes; at most {bytes_max} are accepted here"
        )
    if len(element_bytes) > SPACES_MAX:
        raise UnsupportedSpace(f"a space with {len(element_bytes)} inside; at most {SPACES_MAX} are accepted")
    return _built(description)


def sizes(description: Description) -> list[int]:
    """The bytes of an element's array, for the space and each one inside it; 0 if they vary. Raises ``Exception``."""
    element_bytes, pending = [], [description]
    while pending:
        fields = pending.pop()
        kind = fields["space"]
        nbytes = 0
        if kind == "Box":
            nbytes = _nbytes(fields["dtype"], fields["shape"])
        elif kind == "MultiBinary":
            nbytes = _nbytes("|i1", fields["n"])
        elif kind == "MultiDiscrete":
            nbytes = int(fields["nvec"].nbytes)
        element_bytes.append(nbytes)
        inside = [*fields.get("spaces", ()), *map(fields.get, ("item", "nodes", "edges"))]
        pending += [part for part in inside if part is not None]
    return element_bytes


def _nbytes(dtype: str, shape: list[int]) -> int:
    if not all(type(dim) is int and dim >= 0 for dim in shape):
        raise ValueError("a dimension that is no number")
    return math.prod(shape) * int(np.dtype(dtype).itemsize)


def _built(description: Description) -> Any:
    fields = dict(description)
    name, random = fields.pop("space", None), fields.pop("random", None)
    if name == PICKLED and isinstance(fields.get("value"), gym_spaces.Space):
        return fields["value"]
    if not isinstance(name, str) or name not in _BUILD:
        raise UnsupportedSpace(f"this version of EnvHub knows no space {name!r}, or not on the network")
    try:
        built = _BUILD[name](_built, **fields)
        leaves(built)  # raises for a space that cannot be used
    except UnsupportedSpace:
        raise
    except Exception as error:
        # The fields came over the wire, so any exception of a constructor means that they are malformed.
        raise UnsupportedSpace(printable(f"malformed description of a {name}: {error}")) from error
    if isinstance(random, np.random.Generator):
        built._np_random = random
    return built


def _describe_bound(bound: np.ndarray) -> Any:
    # Most bounds are one value everywhere; an image's 28,224 zeros need not travel.
    first = bound.flat[0] if bound.size else None
    same = first is not None and bool(np.array_equal(bound, np.full_like(bound, first)))
    return np.full((), first, bound.dtype) if same else bound


def _describe_box(space: Any, describe: Describe) -> Description:
    low, high = _describe_bound(space.low), _describe_bound(space.high)
    description = {"dtype": space.dtype.str, "shape": list(space.shape), "low": low, "high": high}
    if space.dtype.kind in "iu":  # Gymnasium stores an infinite bound as a number, but samples it as infinite
        description["bounded"] = [_describe_bound(space.bounded_below), _describe_bound(space.bounded_above)]
    return description


def _build_box(
    build: Build, dtype: str, shape: list[int], low: np.ndarray, high: np.ndarray, bounded: Any = None
) -> Any:
    low, high = (np.broadcast_to(bound, shape).astype(dtype) for bound in (low, high))
    box = gym_spaces.Box(low, high, tuple(shape), np.dtype(dtype))
    if bounded is not None:
        box.bounded_below, box.bounded_above = (np.broadcast_to(side, shape).astype(bool) for side in bounded)
    return box


def _build_discrete(build: Build, n: int, start: int, dtype: str) -> Any:
    newer: dict[str, Any] = {"start": start} if start else {}  # gym before 0.22 has no ``start``
    if np.dtype(dtype) != np.int64:  # the only dtype in Gymnasium before 1.2
        newer["dtype"] = np.dtype(dtype).type
    return gym_spaces.Discrete(n, **newer)


def _build_multi_discrete(build: Build, nvec: np.ndarray, start: np.ndarray, dtype: str) -> Any:
    start_if_any = {"start": start} if np.any(start) else {}  # Gymnasium before 0.29 has no ``start``
    return gym_spaces.MultiDiscrete(nvec, dtype=np.dtype(dtype).type, **start_if_any)


def _describe_dict(space: Any, describe: Describe) -> Description:
    return {
        "keys": list(space.spaces),
        "spaces": [describe(sub) for sub in space.spaces.values()],
        "sort_keys": bool(getattr(space, "sort_keys", False)),
    }


def _build_dict(build: Build, keys: list[str], spaces: list[Description], sort_keys: bool = False) -> Any:
    # A list of pairs keeps the order. Versions with sort_keys need the order, or equal spaces do not compare equal.
    built = gym_spaces.Dict([(key, build(sub)) for key, sub in zip(keys, spaces)])
    if hasattr(built, "sort_keys"):  # pragma: no branch  (old versions, which workers may have, lack it)
        built.sort_keys = sort_keys
    return built


_DESCRIBE: dict[str, Callable[[Any, Describe], Description]] = {
    "Box": _describe_box,
    "Discrete": lambda s, _: {"n": int(s.n), "start": int(getattr(s, "start", 0)), "dtype": s.dtype.str},
    "MultiDiscrete": lambda s, _: {
        "nvec": s.nvec,
        "start": getattr(s, "start", np.zeros_like(s.nvec)),
        "dtype": s.dtype.str,
    },
    "MultiBinary": lambda s, _: {"n": list(s.shape), "flat": isinstance(s.n, (int, np.integer))},
    "Dict": _describe_dict,
    "Tuple": lambda s, describe: {"spaces": [describe(sub) for sub in s.spaces]},
    "Text": lambda s, _: {"min_length": s.min_length, "max_length": s.max_length, "charset": "".join(s.character_list)},
    "Sequence": lambda s, describe: {"item": describe(s.feature_space), "stack": bool(getattr(s, "stack", False))},
    "Graph": lambda s, describe: {
        "nodes": describe(s.node_space),
        "edges": None if s.edge_space is None else describe(s.edge_space),
    },
    "OneOf": lambda s, describe: {"spaces": [describe(sub) for sub in s.spaces]},
}
_BUILD: dict[str, Callable[..., Any]] = {
    "Box": _build_box,
    "Discrete": _build_discrete,
    "MultiDiscrete": _build_multi_discrete,
    "MultiBinary": lambda build, n, flat: gym_spaces.MultiBinary(n[0] if flat else n),
    "Dict": _build_dict,
    "Tuple": lambda build, spaces: gym_spaces.Tuple([build(sub) for sub in spaces]),
    "Text": lambda _, min_length, max_length, charset: gym_spaces.Text(
        max_length, min_length=min_length, charset=charset
    ),
    "Sequence": lambda build, item, stack: gym_spaces.Sequence(build(item), **({"stack": True} if stack else {})),
    "Graph": lambda build, nodes, edges: gym_spaces.Graph(build(nodes), None if edges is None else build(edges)),
    "OneOf": lambda build, spaces: gym_spaces.OneOf([build(sub) for sub in spaces]),
    "Anything": lambda build: Anything(),
}


def native(space: Any) -> Any:
    """The space, or for a space of gym an equal one of the installed Gymnasium; raises ``UnsupportedSpace``."""
    return space if isinstance(space, gym_spaces.Space) else build(describe(space))


def leaves(space: Any) -> list[Leaf]:
    if isinstance(space, gym_spaces.Dict):
        return [leaf for sub in space.spaces.values() for leaf in leaves(sub)]
    if isinstance(space, gym_spaces.Tuple):
        return [leaf for sub in space.spaces for leaf in leaves(sub)]
    arrays = gym_spaces.Box, gym_spaces.Discrete, gym_spaces.MultiDiscrete, gym_spaces.MultiBinary
    return [Leaf(space.dtype.str, tuple(space.shape)) if isinstance(space, arrays) else OBJECT]


def structure(space: Any) -> Any:
    """The nesting and leaves that spaces batched together have in common; the order of keys does not matter."""
    if isinstance(space, gym_spaces.Dict):
        return {key: structure(sub) for key, sub in space.spaces.items()}
    if isinstance(space, gym_spaces.Tuple):
        return [structure(sub) for sub in space.spaces]
    return type(space), leaves(space), getattr(space, "max_length", None)


def flatten(space: Any, value: Any) -> list[Any]:
    """The parts in the order of the leaves; raises ``KeyError``, ``TypeError`` or ``ValueError``."""
    if isinstance(space, gym_spaces.Dict):
        return [part for key, sub in space.spaces.items() for part in flatten(sub, value[key])]
    if isinstance(space, gym_spaces.Tuple):
        if len(value) != len(space.spaces):
            raise ValueError(f"a tuple of {len(value)} where the space has {len(space.spaces)} parts")
        return [part for sub, item in zip(space.spaces, value) for part in flatten(sub, item)]
    return [value]


def assemble(space: Any, parts: Iterator[Any]) -> Any:
    if isinstance(space, gym_spaces.Dict):
        return {key: assemble(sub, parts) for key, sub in space.spaces.items()}
    if isinstance(space, gym_spaces.Tuple):
        return tuple(assemble(sub, parts) for sub in space.spaces)
    return next(parts)


def contains(space: Any, value: Any) -> bool:
    """The result of ``space.contains``, which checks texts in Python; of a long text only its ends are checked."""
    if type(space) is gym_spaces.Dict:
        same_keys = isinstance(value, dict) and value.keys() == space.spaces.keys()
        return same_keys and all(contains(sub, value[key]) for key, sub in space.spaces.items())
    if type(space) is gym_spaces.Tuple and isinstance(value, tuple):
        return len(value) == len(space.spaces) and all(map(contains, space.spaces, value))
    if type(space) is gym_spaces.Text and isinstance(value, str):
        return space.min_length <= len(value) <= space.max_length and _is_of(value, space.character_set)
    return bool(space.contains(value))


def _is_of(text: str, characters: Collection[str]) -> bool:
    if len(text) > 2 * CHECKED_CHARS:
        text = text[:CHECKED_CHARS] + text[-CHECKED_CHARS:]
    if not text.isascii():
        return set(text).issubset(characters)
    return not text.encode().translate(None, "".join(filter(str.isascii, characters)).encode())


def is_flat(space: Any) -> bool:
    return not isinstance(space, (gym_spaces.Dict, gym_spaces.Tuple))


def check_equivalent(space: Any, wanted: Any, observation_mode: str) -> None:
    """Refuse an observation space that cannot be batched with the session's; raises ``SpacesDiffer``."""
    if observation_mode == "same":
        if not _equal(space, wanted):
            raise SpacesDiffer(
                "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments observation spaces "
                "are not equivalent. If this is intentional, use `observation_mode='different'` instead."
            )
    elif not _same_structure(space, wanted):
        raise SpacesDiffer(
            "AsyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environment's "
            "observation spaces do not share a common shape and dtype."
        )


def _same_structure(space: Any, wanted: Any) -> bool:
    if isinstance(wanted, Anything) or structure(space) == structure(wanted):
        return True
    try:
        return bool(structure(nearest(space)) == structure(wanted))
    except UnsupportedSpace:
        return False


def check_action_space(space: Any, wanted: Any, observation_mode: str = "same") -> None:
    """Refuse an action space that is not the session's, but for bounds in some modes; raises ``SpacesDiffer``."""
    fits = _same_structure(space, wanted) if observation_mode in ("first", "any") else _equal(space, wanted)
    if not fits:
        raise SpacesDiffer(
            f"Some environments have an action space different from `{wanted}`. In order to batch actions, the action "
            "spaces from all environments must be equal."
        )


def _equal(space: Any, wanted: Any) -> bool:
    if wanted == space:
        return True
    try:
        # gym 0.21 keeps the spaces of a Tuple in the caller's list or tuple, and a list does not equal a tuple.
        return bool(wanted == build(describe(space)))
    except UnsupportedSpace:
        return False


def space_mismatch(space: Any, value: Any, name: str) -> str:
    """The first part that does not fit, named as Python does, such as ``observation['camera'][0]``; or empty."""
    if isinstance(space, gym_spaces.Dict):
        if not isinstance(value, Mapping):
            return f"{name} is {_kind(value)}, and its space has the keys {', '.join(map(repr, space.spaces))}"
        for key, sub in space.spaces.items():
            if key not in value:
                return f"{name} has no {key!r}, which its space has"
            if why := space_mismatch(sub, value[key], f"{name}[{key!r}]"):
                return why
        return ""
    if isinstance(space, gym_spaces.Tuple):
        if not isinstance(value, (tuple, list)):
            return f"{name} is {_kind(value)}, and its space a tuple of {len(space.spaces)}"
        if len(value) != len(space.spaces):
            return f"{name} has {len(value)} parts, and its space {len(space.spaces)}"
        parts = enumerate(zip(space.spaces, value))
        return next((why for at, (sub, part) in parts if (why := space_mismatch(sub, part, f"{name}[{at}]"))), "")
    if space.shape is None or space.dtype is None or space.dtype.kind not in "biufc":
        return ""  # any object may be an element
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        return f"{name} is no array: its parts have several lengths"
    if array.shape != space.shape:
        description = _kind(value) if value is None else f"of shape {array.shape}"
        return f"{name} is {description}, and its space of shape {space.shape}"
    if not np.can_cast(array.dtype, space.dtype, "same_kind"):
        too_large = array.dtype == object and isinstance(value, int)
        description = "an int of more than 64 bits" if too_large else f"of dtype {array.dtype}"
        return f"{name} is {description}, and its space of dtype {space.dtype}"
    return ""


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
