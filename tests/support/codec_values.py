"""Values as anybody may send them, and what it means that they are the same."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envhub.values import codec

QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

numeric = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(sizes=(64, 128), endianness="?"),
)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
arrays = hnp.arrays(numeric, shapes)
text_and_time = hnp.arrays(
    st.one_of(
        hnp.unicode_string_dtypes(min_len=1, max_len=5),
        hnp.byte_string_dtypes(min_len=1, max_len=5),
        hnp.datetime64_dtypes(endianness="="),
        hnp.timedelta64_dtypes(endianness="="),
    ),
    shapes,
)
scalars = numeric.filter(lambda dtype: dtype.itemsize <= 16).flatmap(
    lambda dtype: hnp.arrays(dtype, ()).map(lambda array: array[()])
)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(categories=["L", "N", "P", "S", "Z", "C"])),  # "C": surrogates, too
    st.binary(),
)
keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    st.one_of(atoms, arrays, text_and_time, scalars),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(st.integers() | st.text(), max_size=4),
        st.frozensets(st.integers() | st.text(), max_size=4),
    ),
    max_leaves=8,
)


class Opaque:
    """What has no form of its own."""

    def __repr__(self) -> str:
        return "<opaque>"


def packed(value: Any) -> bytes:
    """Msgpack as anybody may send it."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def extension(code: int, value: Any) -> bytes:
    return packed(msgpack.ExtType(code, packed(value)))


def same(left: Any, right: Any) -> bool:
    """Equal in value, type, dtype and shape, all the way down; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(left, np.generic):
        return bool(left.dtype == right.dtype and left.tobytes() == right.tobytes())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and left != left:
        return bool(right != right)
    return bool(left == right)


def round_trip(value: Any) -> Any:
    return codec.decode(codec.encode(value))
