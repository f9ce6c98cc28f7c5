"""Batched actions as frames, and back into what an env's ``step`` is given.

An env must see what ``SyncVectorEnv`` would hand it: rows of the caller's array in the caller's dtype, or, from a
list of Python numbers, those numbers. So each action leaf travels with a code: a dtype from a closed list, and a bit
that says whether the elements were Python objects. Values are never cast and never checked against bounds.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np

from envhub.errors import SpaceMismatch
from envhub.layout import Leaf

DTYPES = [np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")]
PYTHON = 0x80  # the elements were Python numbers, or lists of them

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def pack(parts: Sequence[Any], leaves: Sequence[Leaf], num_envs: int) -> tuple[bytes, list[np.ndarray]]:
    """Codes and C-contiguous arrays of a batch whose leaves are ``parts``.

    Raises:
        TypeError: a part is no batch at all.
        SpaceMismatch: wrong count or shape, or a dtype that cannot travel.
    """
    codes, arrays = bytearray(), []
    for part, leaf in zip(parts, leaves):
        python, array = _as_array(part)
        if array.ndim == 0:
            raise TypeError(f"actions must be a batch of {num_envs}, got the single value {part!r}")
        if array.shape != (num_envs, *leaf.shape):
            raise SpaceMismatch(
                f"actions of shape {array.shape} where {num_envs} envs with actions of shape {leaf.shape} need "
                f"{(num_envs, *leaf.shape)}; no env has moved"
            )
        code = _CODES.get(array.dtype)
        if code is None:
            raise SpaceMismatch(f"actions of dtype {array.dtype} cannot be sent to a hub; no env has moved")
        codes.append(code | PYTHON if python else code)
        arrays.append(array)
    return bytes(codes), arrays


def _as_array(part: Any) -> tuple[bool, np.ndarray]:
    if isinstance(part, np.ndarray):
        return False, part if part.flags.c_contiguous else np.ascontiguousarray(part)
    if isinstance(part, (list, tuple)) and part and not isinstance(part[0], (np.ndarray, np.generic)):
        return type(part[0]) in (int, float, bool, list, tuple), np.asarray(part)
    array = np.asarray(part)
    return False, np.ascontiguousarray(array) if array.ndim else array


def nbytes(code: int, leaf: Leaf, num_envs: int) -> int:
    """How long the frame of a leaf with this code must be.

    Raises:
        ValueError: no such code.
    """
    number = code & ~PYTHON
    if number >= len(DTYPES):
        raise ValueError(f"unknown action code {code}")
    return num_envs * leaf.items * DTYPES[number].itemsize


def reader(buffer: np.ndarray, leaf: Leaf, rows: int, row: int, code: int) -> Callable[[], Any]:
    """What reads the action of one row from the arena's ``buffer``, as the env is to see it."""
    dtype = DTYPES[code & ~PYTHON]
    batch = buffer[: rows * leaf.items * dtype.itemsize].view(dtype).reshape(rows, *leaf.shape)
    if code & PYTHON:
        return batch[row].tolist if leaf.shape else lambda: batch[row].item()
    # The env may keep its action, so it gets its own copy; indexing a vector makes a scalar, which is one already.
    return batch[row].copy if leaf.shape else lambda: batch[row]
