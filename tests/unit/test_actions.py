from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envhub.arena.layout import ACTION_ITEM_BYTES
from envhub.errors import SpaceMismatch
from envhub.values import actions
from envhub.values.leaf import OBJECT, Leaf

SCALAR, VECTOR = Leaf("<i8", ()), Leaf("<f4", (3,))


def seen_by_envs(batch: Any, leaf: Leaf, num_envs: int) -> list[Any]:
    """What each env's ``step`` is given after the batch went through frames and arena."""
    codes, arrays, beside = actions.pack([batch], [leaf], num_envs)
    if codes == bytes([actions.OUT_OF_BAND]):
        return list(beside[0])
    raw = arrays[0].tobytes()
    assert [len(raw)] == actions.sizes(codes, [leaf], num_envs)
    buffer = np.zeros(num_envs * leaf.items * ACTION_ITEM_BYTES, np.uint8)
    buffer[: len(raw)] = np.frombuffer(raw, np.uint8)
    return [actions.reader(buffer, leaf, num_envs, row, codes[0])() for row in range(num_envs)]


@settings(deadline=None)
@given(
    st.sampled_from(actions.DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))
    )
)
def test_any_batch_of_a_dtype_that_travels_is_seen_bit_for_bit(batch: np.ndarray) -> None:
    leaf = Leaf("<f4", batch.shape[1:])
    for row, seen in enumerate(seen_by_envs(batch, leaf, len(batch))):
        assert seen.dtype == batch.dtype
        assert seen.tobytes() == batch[row].tobytes()


@pytest.mark.parametrize("batch", [[0, 1], (0, 1), [True, False], [0.5, 1.5]])
def test_python_numbers_are_seen_as_python_numbers(batch: Any) -> None:
    seen = seen_by_envs(batch, SCALAR, 2)
    assert seen == list(batch)
    assert [type(action) for action in seen] == [type(action) for action in batch]


def test_row_of_an_array_of_python_numbers_is_seen_as_a_list() -> None:
    batch = np.array([[1, 2, 3], [4, 5, 6]])
    code = actions.DTYPES.index(batch.dtype) | actions.PYTHON
    seen = [actions.reader(batch.view(np.uint8).ravel(), VECTOR, 2, row, code)() for row in range(2)]
    assert seen == [[1, 2, 3], [4, 5, 6]] and type(seen[0][0]) is int


@pytest.mark.parametrize(
    "batch",
    [
        [np.array(1), np.array(2)],
        [np.zeros(3, np.float32), np.ones(3, np.float32)],
        [np.zeros(3, np.float32), np.zeros(3, np.float64)],
        [np.int32(1), np.int32(2)],
        [np.int32(1), np.int64(2)],
    ],
    ids=["without dimensions", "arrays", "of two dtypes", "scalars", "scalars of two dtypes"],
)
def test_arrays_and_scalars_in_a_list_are_seen_as_they_are(batch: Any) -> None:
    seen = seen_by_envs(batch, VECTOR if np.ndim(batch[0]) else SCALAR, 2)
    assert [type(action) for action in seen] == [type(action) for action in batch]
    assert [action.dtype for action in seen] == [action.dtype for action in batch]
    assert all(map(np.array_equal, seen, batch))


@pytest.mark.parametrize(
    "batch",
    [[np.zeros(3, np.float32)], [np.zeros(3, np.float32)] * 2, [np.float32(1)] * 2, [1.0, 2.0], np.zeros(2)],
    ids=["array", "arrays", "scalars", "numbers", "batch"],
)
def test_batch_that_an_array_can_hold_travels_as_one(batch: Any) -> None:
    packed = actions.pack([batch], [Leaf("<f4", np.shape(batch)[1:])], len(batch))
    assert packed.codes != bytes([actions.OUT_OF_BAND]) and np.array_equal(packed.arrays[0], batch)


def test_array_that_is_not_contiguous_is_packed_row_by_row() -> None:
    batch = np.arange(12, dtype=np.float32).reshape(6, 2).T[:, ::2]
    (packed,) = actions.pack([batch], [VECTOR], 2).arrays
    assert packed.flags.c_contiguous and np.array_equal(packed, batch)
    assert actions.pack([packed], [VECTOR], 2).arrays[0] is packed  # without a copy
    assert [seen.tolist() for seen in seen_by_envs(batch, VECTOR, 2)] == batch.tolist()


def test_env_may_keep_its_action() -> None:
    buffer = np.zeros(2 * 3 * ACTION_ITEM_BYTES, np.uint8)
    read = actions.reader(buffer, VECTOR, 2, 0, actions.DTYPES.index(np.dtype("f4")))
    kept = read()
    buffer[:] = 255
    assert kept.tolist() == [0, 0, 0]


def test_reader_sees_what_the_arena_holds_when_it_is_called() -> None:
    for code, value in ((4, np.int64(7)), (4 | actions.PYTHON, 7)):
        buffer = np.zeros(2 * ACTION_ITEM_BYTES, np.uint8)
        read = actions.reader(buffer, SCALAR, 2, 1, code)
        buffer.view(np.int64)[1] = 7
        assert read() == value
        assert type(read()) is type(value)


def test_frame_length_follows_from_code_shape_and_number_of_envs() -> None:
    codes = bytes([0, 11 | actions.PYTHON, actions.OUT_OF_BAND, 4, actions.OUT_OF_BAND])
    leaves = [VECTOR, VECTOR, VECTOR, Leaf("<i8", (0,)), OBJECT]
    assert actions.sizes(codes, leaves, 5) == [15, 120, 0]


@pytest.mark.parametrize(("code", "leaf"), [(12, SCALAR), (12 | 0x80, SCALAR), (255, SCALAR), (4, OBJECT)])
def test_code_that_a_leaf_has_not_is_refused(code: int, leaf: Leaf) -> None:
    with pytest.raises(ValueError, match=f"has no code {code}"):
        actions.sizes(bytes([code]), [leaf], 2)


@pytest.mark.parametrize(
    "batch",
    [np.zeros(3, np.int64), np.zeros((2, 1), np.int64), [0, 1, 2], [], np.zeros((0,), np.int64), np.zeros((2, 2))],
    ids=["long", "column", "long list", "empty list", "empty", "square"],
)
def test_batch_of_another_shape_is_refused(batch: Any) -> None:
    with pytest.raises(SpaceMismatch, match="no env has moved"):
        actions.pack([batch], [SCALAR], 2)


ODD = [
    np.zeros(2, ">i4"),
    np.zeros(2, np.complex64),
    np.array([None, 1]),
    [2**70, 1],
    ["a", "b"],
    [1, 2.5],
    (x for x in "ab"),
]


@pytest.mark.parametrize("batch", ODD, ids=lambda batch: type(batch).__name__)
def test_batch_that_is_no_array_of_numbers_is_seen_element_by_element(batch: Any) -> None:
    wanted = list(batch) if not hasattr(batch, "send") else ["a", "b"]
    seen = seen_by_envs(batch, SCALAR, 2)
    assert seen == wanted and list(map(type, seen)) == list(map(type, wanted))


@pytest.mark.parametrize("batch", [[[1, 2, 3], [1, 2]], [[1, [2, 3]], [1, 2]], [np.zeros(3), np.zeros(2)]], ids=str)
def test_ragged_batch_is_refused(batch: Any) -> None:
    with pytest.raises(SpaceMismatch, match="no env has moved"):
        actions.pack([batch], [VECTOR], 2)


def test_values_of_no_fixed_size_are_taken_as_they_are() -> None:
    batch = ("a", [1, 2])
    assert actions.pack([batch], [OBJECT], 2) == (bytes([actions.OUT_OF_BAND]), [], [batch])
    with pytest.raises(SpaceMismatch, match="no env has moved"):
        actions.pack([batch], [OBJECT], 3)


@pytest.mark.parametrize("batch", [1, 0.5, np.int64(1), np.array(1), "ab", b"ab", {"a": 1, "b": 2}])
def test_single_value_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match="batch of 2"):
        actions.pack([batch], [SCALAR], 2)


class OfBfloat16:
    """A tensor as one of torch, of a dtype that NumPy does not have."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raise TypeError("Got unsupported ScalarType BFloat16")


def test_tensor_that_numpy_cannot_have_is_refused() -> None:
    with pytest.raises(SpaceMismatch, match="unsupported ScalarType BFloat16; no env has moved"):
        actions.pack([OfBfloat16()], [VECTOR], 2)
