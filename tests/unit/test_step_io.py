"""The frames of a STEP and of a SEND: frames that fit are written into the arena, and others leave it unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from envhub_server.memory.session_memory import StepFrames

from envhub.arena.layout import Layout
from envhub.arena.memory import OP_OUT_OF_BAND, OP_STEP, Arena, ArenaDriver, allocate
from envhub.protocol import messages
from envhub.values import actions, codec
from envhub.values.leaf import OBJECT, Leaf

ROWS = 3
INT8, INT64, FLOAT32 = (actions.DTYPES.index(np.dtype(name)) for name in ("i1", "i8", "f4"))
OUT_OF_BAND, PYTHON = actions.OUT_OF_BAND, actions.PYTHON
NUMBER, VECTOR = Leaf("<i8", ()), Leaf("<f4", (2,))
VECTORS = np.arange(6, dtype=np.float32).reshape(ROWS, 2)
INTS = np.arange(ROWS, dtype=np.int64)


def new_arena(*leaves: Leaf) -> Arena:
    layout = Layout(ROWS, (VECTOR,), leaves, 64)
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

    def load(self, codes: bytes, frames: Sequence[Any]) -> str:
        problem = super().load(codes, frames)
        if not problem:
            self._driver.post(OP_OUT_OF_BAND if self.out_of_band else OP_STEP, self.codes, self.arrays)
        return problem


def actions_of(arena: Arena, leaf: int, dtype: Any) -> list[Any]:
    found: list[Any] = arena.actions[leaf].view(dtype)[: ROWS * arena.layout.actions[leaf].items].tolist()
    return found


def test_frames_of_a_step_are_written_into_the_arena_with_their_codes() -> None:
    arena = new_arena(NUMBER, VECTOR)
    frames = Frames(arena)
    assert frames.load(bytes([INT64, FLOAT32]), [INTS.tobytes(), VECTORS.tobytes()]) == ""
    assert actions_of(arena, 0, "i8") == [0, 1, 2] and actions_of(arena, 1, "f4") == [0, 1, 2, 3, 4, 5]
    assert [column.tolist() for column in arena.action_codes] == [[INT64] * ROWS, [FLOAT32] * ROWS]
    assert not frames.out_of_band


def test_codes_may_change_between_steps() -> None:
    arena = new_arena(NUMBER)
    frames = Frames(arena)
    for code, dtype in ((INT64, "i8"), (INT8, "i1"), (INT8, "i1"), (INT64 | PYTHON, "i8"), (INT64, "i8")):
        batch = np.arange(ROWS).astype(dtype)
        assert frames.load(bytes([code]), [batch.tobytes()]) == ""
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
    arena = new_arena(NUMBER, VECTOR)
    frames = Frames(arena)
    good = bytes([INT64, FLOAT32]), [(INTS + 7).tobytes(), (VECTORS + 7).tobytes()]
    if stepped_before:
        assert frames.load(*good) == ""
    before = everything(arena)
    problem = frames.load(codes, wrong)
    assert why in problem and problem.endswith("; no env has moved")
    assert everything(arena) == before
    assert frames.load(*good) == ""
    assert actions_of(arena, 0, "i8") == [7, 8, 9] and arena.action_codes[1].tolist() == [FLOAT32] * ROWS


def test_array_for_a_leaf_of_no_fixed_size_is_refused() -> None:
    arena = new_arena(OBJECT)
    before = everything(arena)
    problem = Frames(arena).load(bytes([INT64]), [INTS.tobytes()])
    assert "has no code" in problem and problem.endswith("; no env has moved") and everything(arena) == before


# --- actions out of band ----------------------------------------------------------------------------------------------


def test_actions_out_of_band_are_kept_for_the_workers_rows() -> None:
    arena = new_arena(NUMBER, OBJECT)
    frames = Frames(arena)
    assert frames.load(bytes([INT64, OUT_OF_BAND]), [INTS.tobytes(), out_of_band(0, 1, 2)]) == ""
    assert frames.out_of_band and actions_of(arena, 0, "i8") == [0, 1, 2]
    assert arena.action_codes[1].tolist() == [OUT_OF_BAND] * ROWS
    assert frames.out_of_band_of([2, 0]) == out_of_band(2, 0)


def test_leaf_without_an_array_has_no_frame_though_later_leaves_have_one() -> None:
    arena = new_arena(OBJECT, VECTOR)
    frames = Frames(arena)
    assert frames.load(bytes([OUT_OF_BAND, FLOAT32]), [VECTORS.tobytes(), out_of_band(0, 1, 2)]) == ""
    assert actions_of(arena, 1, "f4") == [0, 1, 2, 3, 4, 5]


def test_step_after_one_with_actions_out_of_band_may_have_none() -> None:
    arena = new_arena(NUMBER)
    frames = Frames(arena)
    assert frames.load(bytes([OUT_OF_BAND]), [out_of_band(0, 1, 2)]) == "" and frames.out_of_band
    assert frames.load(bytes([INT64]), [INTS.tobytes()]) == "" and not frames.out_of_band
    assert frames.load(bytes([OUT_OF_BAND]), [out_of_band(0, 1, 2)]) == "" and frames.out_of_band


# --- parts ------------------------------------------------------------------------------------------------------------


def test_part_has_its_rows_and_an_array_for_each_leaf() -> None:
    arena = new_arena(NUMBER, VECTOR)
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
