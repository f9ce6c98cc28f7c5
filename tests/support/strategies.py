"""Hypothesis strategies: spaces of every kind, nested at will, and infos."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]


@st.composite
def boxes(draw: st.DrawFn) -> gym_spaces.Box:
    dtype = np.dtype(draw(st.sampled_from(["float16", "float32", "float64", "int8", "uint8", "int32", "int64"])))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=3))
    bounds = st.integers(0 if dtype.kind == "u" else -100, 100)
    low = draw(hnp.arrays(dtype, shape, elements=bounds) | bounds.map(lambda bound: np.full(shape, bound, dtype)))
    high = low + draw(st.integers(0, 20)) if draw(st.booleans()) else np.maximum(low, 101)
    if dtype.kind == "f":
        low = np.where(draw(hnp.arrays(bool, shape)), -np.inf, low)
        high = np.where(draw(hnp.arrays(bool, shape)), np.inf, high)
    return gym_spaces.Box(low.astype(dtype), high.astype(dtype), shape, dtype.type)


@st.composite
def multi_discretes(draw: st.DrawFn) -> gym_spaces.MultiDiscrete:
    dtype = np.dtype(draw(st.sampled_from(["int8", "int32", "int64", "uint8"])))
    shape = draw(hnp.array_shapes(max_dims=2, max_side=3))
    nvec = draw(hnp.arrays(dtype, shape, elements=st.integers(1, 50)))
    start = draw(hnp.arrays(dtype, shape, elements=st.integers(0, 50)))
    return gym_spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)


discretes = st.builds(
    lambda n, start, dtype: gym_spaces.Discrete(n, start=start, dtype=np.dtype(dtype).type),
    st.integers(1, 50),
    st.integers(0, 50),
    st.sampled_from(INTEGERS),
)
multi_binaries = st.builds(
    gym_spaces.MultiBinary, st.integers(1, 5) | st.lists(st.integers(1, 3), min_size=1, max_size=3)
)
texts = st.builds(
    lambda low, more, charset: gym_spaces.Text(low + more, min_length=low, charset=charset),
    st.integers(0, 3),
    st.integers(1, 5),
    st.sets(st.characters(codec="utf-8"), min_size=1, max_size=5).map("".join),
)
sequences = st.builds(lambda item, stack: gym_spaces.Sequence(item, stack=stack), boxes() | discretes, st.booleans())
graphs = st.builds(
    gym_spaces.Graph,
    hnp.array_shapes(min_dims=1, max_dims=2, max_side=3).map(lambda shape: gym_spaces.Box(-1, 1, shape)),
    st.none() | st.integers(1, 5).map(gym_spaces.Discrete),
)
one_ofs = st.lists(boxes() | discretes | texts, min_size=1, max_size=3).map(gym_spaces.OneOf)
leaf_spaces = st.one_of(boxes(), discretes, multi_discretes(), multi_binaries, texts, sequences, graphs, one_ofs)
# An env may tell its action as an info. Where one key is another with a "_" before it, Gymnasium puts the mask of the
# other in its place, or its value in place of the mask, by the order of the keys.
keys = st.text(max_size=3).filter(lambda key: not key.startswith("_"))
any_space = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(gym_spaces.Tuple),
        st.dictionaries(keys, inner, min_size=1, max_size=3).map(gym_spaces.Dict),
        st.lists(st.tuples(keys, inner), min_size=1, max_size=3, unique_by=lambda pair: pair[0]).map(
            lambda pairs: gym_spaces.Dict(pairs)
        ),
    ),
    max_leaves=5,
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.complex_numbers(allow_nan=False, max_magnitude=10),
    st.sampled_from([np.int8(3), np.float32(0.5), np.bool_(True), np.uint64(2**63), np.datetime64("2026-01-01")]),
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars
    | hnp.arrays(st.sampled_from(["i8", "f4", "?", "U3", "M8[s]", "c8"]), hnp.array_shapes(max_dims=2, max_side=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(min_size=1, max_size=3), inner, max_size=3),
    ),
    max_leaves=4,
)
infos = st.dictionaries(st.text("abcxyz", min_size=1, max_size=2), values, max_size=3)


@st.composite
def runs_of_infos(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Infos that can be batched: a key means the same in each of them, and may be missing in some."""
    everything = draw(infos)
    return draw(
        st.lists(st.sampled_from([{}, everything, *({key: everything[key]} for key in everything)]), max_size=3)
    )
