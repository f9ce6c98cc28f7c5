"""Batched actions as frames, and back as arguments of an env's ``step``; its results as arrays.

An env must get the same action as from ``SyncVectorEnv``: a row of the caller's array in the caller's dtype, or the
caller's Python numbers. So each action leaf travels with a code: a dtype from a closed list, and a bit that says
whether the elements were Python numbers. A batch that is not an array of these dtypes, such as text, a graph or a list
of mixed numbers, travels out of band, element by element. Values are never cast and never checked against bounds.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from envhub.errors import SpaceMismatch
from envhub.values.leaf import OBJECT, Leaf

DTYPES = [np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")]
PYTHON = 0x80  # the elements were Python numbers
OUT_OF_BAND = 0x7F  # the leaf has no array: its elements travel out of band, each as a value

RESULT_BYTES = 10  # a reward and two flags
_REWARD, _FLAG = np.dtype(np.float64), np.dtype(np.bool_)

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_NUMBERS = {int: "iu", float: "f", bool: "b"}


class Packed(NamedTuple):
    """A batch of actions: a code per leaf, C-contiguous arrays, and the elements of each leaf without an array."""

    codes: bytes
    arrays: list[np.ndarray]
    out_of_band: list[Sequence[Any]]


def pack(parts: Sequence[Any], leaves: Sequence[Leaf], num_envs: int) -> Packed:
    """Pack a batch whose leaves are ``parts``; raises ``TypeError`` or ``SpaceMismatch``."""
    codes, arrays, out_of_band = bytearray(), [], []
    for part, leaf in zip(parts, leaves):
        batch: Any = part if type(part) is np.ndarray and part.ndim else _as_batch(part, num_envs)
        converted = None if leaf.dtype == OBJECT.dtype else _as_array(batch)
        if converted is None:
            _check_elements(batch, leaf, num_envs)
            codes.append(OUT_OF_BAND)
            out_of_band.append(batch)
            continue
        python, array = converted
        if array.shape != (num_envs, *leaf.shape):
            raise _mismatch(array.shape, leaf, num_envs)
        codes.append(_CODES[array.dtype] | PYTHON if python else _CODES[array.dtype])
        arrays.append(array)
    return Packed(bytes(codes), arrays, out_of_band)


def _as_batch(part: Any, num_envs: int) -> Any:
    if isinstance(part, (list, tuple)):
        return part
    try:
        batch = np.asarray(part) if hasattr(part, "__array__") else part
    except TypeError as error:  # such as of a tensor of bfloat16, which NumPy has not
        raise SpaceMismatch(f"actions that are no array of NumPy: {error}; no env has moved") from error
    if isinstance(batch, (str, bytes, dict)) or not hasattr(batch, "__iter__") or getattr(batch, "ndim", 1) == 0:
        raise TypeError(f"actions must be a batch of {num_envs}, got the single value {part!r}")
    return batch if isinstance(batch, np.ndarray) else list(batch)


def _as_array(batch: Any) -> tuple[bool, np.ndarray] | None:
    """True if the elements are Python numbers, and the elements as an array; None if an array would change them."""
    python = False
    if not isinstance(batch, np.ndarray):
        kinds = set(map(type, batch))
        kind = kinds.pop() if len(kinds) == 1 else object
        python = kind in _NUMBERS
        if not (python or issubclass(kind, np.generic) or (kind is np.ndarray and _have_one_shape(batch))):
            return None
        batch = np.asarray(batch)
        if python and batch.dtype.kind not in _NUMBERS[kind]:  # NumPy has no integer dtype for all of them
            return None
    if batch.dtype not in _CODES:
        return None
    return python, batch if batch.flags.c_contiguous else np.ascontiguousarray(batch)


def _have_one_shape(arrays: Sequence[np.ndarray]) -> bool:
    first = arrays[0]
    return first.ndim > 0 and all(array.dtype == first.dtype and array.shape == first.shape for array in arrays)


def _check_elements(batch: Any, leaf: Leaf, num_envs: int) -> None:
    if len(batch) != num_envs:
        raise _mismatch((len(batch), *leaf.shape), leaf, num_envs)
    if leaf == OBJECT:
        return
    for element in batch:
        try:
            shape = np.shape(element)
        except ValueError as error:  # a ragged list
            raise SpaceMismatch(f"an action that is no array: {error}; no env has moved") from error
        if shape != leaf.shape:
            raise _mismatch((num_envs, *shape), leaf, num_envs)


def _mismatch(shape: tuple[int, ...], leaf: Leaf, num_envs: int) -> SpaceMismatch:
    return SpaceMismatch(
        f"actions of shape {shape} where {num_envs} envs with actions of shape {leaf.shape} need "
        f"{(num_envs, *leaf.shape)}; no env has moved"
    )


def sizes(codes: bytes, leaves: Sequence[Leaf], num_envs: int) -> list[int]:
    nbytes = []
    for code, leaf in zip(codes, leaves):
        if code == OUT_OF_BAND:
            continue
        if code & ~PYTHON >= len(DTYPES) or leaf == OBJECT:
            raise ValueError(f"an action leaf of {leaf.dtype} has no code {code}")
        nbytes.append(num_envs * leaf.items * DTYPES[code & ~PYTHON].itemsize)
    return nbytes


def batch_of(buffer: np.ndarray, leaf: Leaf, rows: int, code: int) -> np.ndarray:
    dtype = DTYPES[code & ~PYTHON]
    return buffer[: rows * leaf.items * dtype.itemsize].view(dtype).reshape(rows, *leaf.shape)


def reader(buffer: np.ndarray, leaf: Leaf, rows: int, row: int, code: int) -> Callable[[], Any]:
    """A function that reads the action of one row from the arena's ``buffer``, in the form for the env."""
    batch = batch_of(buffer, leaf, rows, code)
    if code & PYTHON:
        return batch[row].tolist if leaf.shape else partial(batch.item, row)
    # The env may keep its action, so it gets a copy. Indexing a vector makes a scalar, which is a copy already.
    return batch[row].copy if leaf.shape else partial(batch.__getitem__, row)


def split_results(results: Any, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, terminations and truncations as views of the bytes of all three; raises ``ValueError``."""
    if len(results) != rows * RESULT_BYTES:
        raise ValueError(f"{len(results)} bytes of results for {rows} rows")
    return (
        np.ndarray(rows, _REWARD, results),
        np.ndarray(rows, _FLAG, results, rows * _REWARD.itemsize),
        np.ndarray(rows, _FLAG, results, rows * (_REWARD.itemsize + _FLAG.itemsize)),
    )
