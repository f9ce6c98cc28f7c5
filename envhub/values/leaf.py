"""Leaves: the parts of a space that are neither Dict nor Tuple, each an array or an object of variable size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

LEAVES_MAX = 1000  # of a space; each leaf is a frame, and PROTOCOL.md limits the frames of a message
LEAF_DIMENSIONS_MAX = 30  # NumPy 1 allows 32; an arena has two more: slot and row
LEAF_ITEMS_MAX = 1 << 30  # of one env; a frame cannot hold more

# Booleans, integers and floats of NumPy's ``dtype.str``. Any other dtype is refused, because another process writes the
# memory and NumPy follows the items of an object array as pointers.
_NUMERIC = re.compile(r"[<>|=]?(b1|[iu][1248]|f(2|4|8|12|16))", re.ASCII)


@dataclass(frozen=True)
class Leaf:
    """One part of a space: one env's entry in an array, or ``OBJECT``, a value of variable size."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        dtype, shape = self.dtype, self.shape
        if (dtype, shape) == ("O", ()):
            return
        if not (isinstance(dtype, str) and _NUMERIC.fullmatch(dtype)):
            raise ValueError(f"a leaf of dtype {str(dtype)[:32]!r}; leaves are booleans, integers and floats")
        if len(shape) > LEAF_DIMENSIONS_MAX:
            raise ValueError(f"a leaf of {len(shape)} dimensions; at most {LEAF_DIMENSIONS_MAX} are carried")
        if not all(type(dim) is int and 0 <= dim <= LEAF_ITEMS_MAX for dim in shape):
            raise ValueError(f"a leaf with a dimension that is no number from 0 to {LEAF_ITEMS_MAX}")
        if math.prod(max(dim, 1) for dim in shape) > LEAF_ITEMS_MAX:
            raise ValueError(f"a leaf of more than {LEAF_ITEMS_MAX} items")

    @property
    def items(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.items * np.dtype(self.dtype).itemsize

    def wire(self) -> list[Any]:
        return [self.dtype, list(self.shape)]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> Leaf:
        if len(wire) != 2 or not isinstance(wire[1], list):
            raise ValueError("a leaf is a dtype and a list of dimensions")
        return cls(wire[0], tuple(wire[1]))


OBJECT = Leaf("O", ())
ANYTHING = {"space": "Anything"}  # the description of the space that accepts every value; its leaf is ``OBJECT``
