from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from envhub_server.memory.session_memory import StepFrames
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envhub.arena.layout import ACTION_ITEM_BYTES, Layout
from envhub.arena.memory import OP_OUT_OF_BAND, OP_STEP, Arena, ArenaDriver, allocate
from envhub.errors import SpaceMismatch
from envhub.protocol import messages
from envhub.values import actions, codec
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


# --- frames of a STEP and of a SEND -----------------------------------------------------------------------------------


ROWS = 3
INT8, INT64, FLOAT32 = (actions.DTYPES.index(np.dtype(name)) for name in ("i1", "i8", "f4"))
OUT_OF_BAND, PYTHON = actions.OUT_OF_BAND, actions.PYTHON
NUMBER, PAIR = Leaf("<i8", ()), Leaf("<f4", (2,))
VECTORS = np.arange(6, dtype=np.float32).reshape(ROWS, 2)
INTS = np.arange(ROWS, dtype=np.int64)


def new_arena(*leaves: Leaf) -> Arena:
    layout = Layout(ROWS, (PAIR,), leaves, 64)
    with open(allocate(layout, large_infos_bytes_max=0), "r+b", buffering=0) as memory:
        return Arena(layout, memory.fileno())


def everything(arena: Arena) -> bytes:
    """All bytes of the arena."""
    return bytes(arena._memory)


def out_of_band(*rows: int) -> bytes:
    return messages.pack_rows((row, codec.encode([row])) for row in rows)


class Frames(StepFrames):
    """Frames that are posted as soon as they fit."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, ArenaDriver(arena))

    def load(self, codes: bytes, frames: Sequence[Any]) -> None:
        super().load(codes, frames)
        self._driver.post(OP_OUT_OF_BAND if self.out_of_band else OP_STEP, self.codes, self.arrays)


def actions_of(arena: Arena, leaf: int, dtype: Any) -> list[Any]:
    found: list[Any] = arena.actions[leaf].view(dtype)[: ROWS * arena.layout.actions[leaf].items].tolist()
    return found


def test_frames_of_a_step_are_written_into_the_arena_with_their_codes() -> None:
    arena = new_arena(NUMBER, PAIR)
    frames = Frames(arena)
    frames.load(bytes([INT64, FLOAT32]), [INTS.tobytes(), VECTORS.tobytes()])
    assert actions_of(arena, 0, "i8") == [0, 1, 2] and actions_of(arena, 1, "f4") == [0, 1, 2, 3, 4, 5]
    assert [column.tolist() for column in arena.action_codes] == [[INT64] * ROWS, [FLOAT32] * ROWS]
    assert not frames.out_of_band


def test_codes_may_change_between_steps() -> None:
    arena = new_arena(NUMBER)
    frames = Frames(arena)
    for code, dtype in ((INT64, "i8"), (INT8, "i1"), (INT8, "i1"), (INT64 | PYTHON, "i8"), (INT64, "i8")):
        batch = np.arange(ROWS).astype(dtype)
        frames.load(bytes([code]), [batch.tobytes()])
        assert arena.action_codes[0].tolist() == [code] * ROWS and actions_of(arena, 0, dtype) == [0, 1, 2]


REFUSALS = {
    "too few codes": (bytes([INT64]), [INTS.tobytes(), VECTORS.tobytes()], "1 codes for 2 action leaves"),
    "no codes": (b"", [], "0 codes for 2 action leaves"),
    "an unknown code": (bytes([INT64, 12]), [INTS.tobytes(), VECTORS.tobytes()], "has no code 12"),
    "an unknown code of Python's": (bytes([INT64, 12 | PYTHON]), [INTS.tobytes(), b""], "has no code 140"),
    "no frame": (bytes([INT64, FLOAT32]), [], "action frames of"),
    "a frame too few": (bytes([INT64, FLOAT32]), [INTS.tobytes()], "action frames of"),
    "a frame too many": (bytes([INT64, FLOAT32]), [INTS.tobytes(), VECTORS.tobytes(), b""], "action frames of"),
    "a short frame": (bytes([INT64, FLOAT32]), [INTS.tobytes(), VECTORS.tobytes()[:-1]], "action frames of"),
    "a long frame": (bytes([INT64, FLOAT32]), [INTS.tobytes() + b"x", VECTORS.tobytes()], "action frames of"),
    "frames in another order": (bytes([INT64, FLOAT32]), [VECTORS.tobytes()[:12], INTS.tobytes()], "action frames of"),
    "no rows frame": (bytes([INT64, OUT_OF_BAND]), [INTS.tobytes()], "action frames of"),
    "a rows frame that ends in a row": (
        bytes([INT64, OUT_OF_BAND]),
        [INTS.tobytes(), out_of_band(0, 1, 2)[:-1]],
        "ends in",
    ),
    "a row that is none": (bytes([INT64, OUT_OF_BAND]), [INTS.tobytes(), out_of_band(0, 1, 3)], "holds more than each"),
    "a row too few": (bytes([INT64, OUT_OF_BAND]), [INTS.tobytes(), out_of_band(0, 1)], "not one for each row"),
    "a row twice": (bytes([INT64, OUT_OF_BAND]), [INTS.tobytes(), out_of_band(0, 1, 1)], "not one for each row"),
    "rows in another order": (
        bytes([INT64, OUT_OF_BAND]),
        [INTS.tobytes(), out_of_band(0, 2, 1)],
        "not one for each row",
    ),
}


@pytest.mark.parametrize(("codes", "wrong", "why"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("stepped_before", [False, True])
def test_refused_frames_leave_the_arena_as_it_was(
    codes: bytes, wrong: Sequence[bytes], why: str, stepped_before: bool
) -> None:
    arena = new_arena(NUMBER, PAIR)
    frames = Frames(arena)
    good = bytes([INT64, FLOAT32]), [(INTS + 7).tobytes(), (VECTORS + 7).tobytes()]
    if stepped_before:
        frames.load(*good)
    before = everything(arena)
    with pytest.raises(ValueError, match=why):
        frames.load(codes, wrong)
    assert everything(arena) == before
    frames.load(*good)
    assert actions_of(arena, 0, "i8") == [7, 8, 9] and arena.action_codes[1].tolist() == [FLOAT32] * ROWS


def test_array_for_a_leaf_of_no_fixed_size_is_refused() -> None:
    arena = new_arena(OBJECT)
    before = everything(arena)
    with pytest.raises(ValueError, match="has no code"):
        Frames(arena).load(bytes([INT64]), [INTS.tobytes()])
    assert everything(arena) == before


# --- actions out of band ----------------------------------------------------------------------------------------------


def test_actions_out_of_band_are_kept() -> None:
    arena = new_arena(NUMBER, OBJECT)
    frames = Frames(arena)
    frames.load(bytes([INT64, OUT_OF_BAND]), [INTS.tobytes(), out_of_band(0, 1, 2)])
    assert frames.out_of_band and actions_of(arena, 0, "i8") == [0, 1, 2]
    assert arena.action_codes[1].tolist() == [OUT_OF_BAND] * ROWS


def test_leaf_without_an_array_has_no_frame_though_later_leaves_have_one() -> None:
    arena = new_arena(OBJECT, PAIR)
    frames = Frames(arena)
    frames.load(bytes([OUT_OF_BAND, FLOAT32]), [VECTORS.tobytes(), out_of_band(0, 1, 2)])
    assert actions_of(arena, 1, "f4") == [0, 1, 2, 3, 4, 5]


def test_step_after_one_with_actions_out_of_band_may_have_none() -> None:
    arena = new_arena(NUMBER)
    frames = Frames(arena)
    frames.load(bytes([OUT_OF_BAND]), [out_of_band(0, 1, 2)])
    assert frames.out_of_band
    frames.load(bytes([INT64]), [INTS.tobytes()])
    assert not frames.out_of_band
    frames.load(bytes([OUT_OF_BAND]), [out_of_band(0, 1, 2)])
    assert frames.out_of_band


# --- parts ------------------------------------------------------------------------------------------------------------


def test_part_has_its_rows_and_an_array_for_each_leaf() -> None:
    arena = new_arena(NUMBER, PAIR)
    before = everything(arena)
    numbers, vectors = np.array([5, 6]), np.ones((2, 2), np.float32)
    rows, arrays = Frames(arena).part([2, 0], bytes([INT64, FLOAT32]), [numbers.tobytes(), vectors.tobytes()])
    assert rows.tolist() == [2, 0] and arrays[0].tolist() == [5, 6] and arrays[1].tolist() == vectors.tolist()
    assert everything(arena) == before  # posting the part writes it


WRONG_PARTS = {
    "no rows": ([], bytes([INT64]), [b""]),
    "a row twice": ([1, 1], bytes([INT64]), [INTS[:2].tobytes()]),
    "a row that is none": ([0, ROWS], bytes([INT64]), [INTS[:2].tobytes()]),
    "a negative row": ([-1], bytes([INT64]), [INTS[:1].tobytes()]),
    "no codes": ([0], b"", []),
    "a code too many": ([0], bytes([INT64, INT64]), [INTS[:1].tobytes()] * 2),
    "an unknown code": ([0], bytes([12]), [INTS[:1].tobytes()]),
    "actions out of band": ([0], bytes([OUT_OF_BAND]), [out_of_band(0)]),
    "no frame": ([0], bytes([INT64]), []),
    "a frame too many": ([0], bytes([INT64]), [INTS[:1].tobytes()] * 2),
    "a frame of all rows": ([0], bytes([INT64]), [INTS.tobytes()]),
}


@pytest.mark.parametrize(("rows", "codes", "wrong"), WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_part_that_does_not_fit_is_refused(rows: list[int], codes: bytes, wrong: list[bytes]) -> None:
    arena = new_arena(NUMBER)
    before = everything(arena)
    with pytest.raises(ValueError, match=r"rows|frames|code"):
        Frames(arena).part(rows, codes, wrong)
    assert everything(arena) == before
