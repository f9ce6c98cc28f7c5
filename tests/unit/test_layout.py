from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envhub.arena.layout import (
    ACTION_ITEM_BYTES,
    ALIGNMENT,
    HEADER_BYTES,
    ROW_WORDS,
    SLOTS,
    Layout,
    are_whole_workers,
    whole_workers_text,
)
from envhub.values.actions import split_results
from envhub.values.leaf import LEAVES_MAX, OBJECT, Leaf

dtypes = st.sampled_from(["<f4", "<f8", "|u1", "<i8", "<f2", "|i1", "|b1"])
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
leaves = st.lists(st.builds(Leaf, dtypes, shapes), max_size=4).map(tuple)
layouts = st.builds(Layout, st.integers(1, 70), leaves, leaves, st.integers(0, 300))


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_fields_are_apart_aligned_and_inside_the_arena(layout: Layout) -> None:
    fields = sorted(layout.fields().values(), key=lambda field: field.offset)
    end = HEADER_BYTES
    for field in fields:
        assert field.offset >= end
        assert field.offset % ALIGNMENT == 0
        end = field.offset + field.nbytes
    assert end <= layout.nbytes()
    assert layout.nbytes() % HEADER_BYTES == 0


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_every_leaf_has_its_field_in_the_order_of_the_space(layout: Layout) -> None:
    fields = layout.fields()
    for number, leaf in enumerate(layout.observations):
        field = fields[f"observation/{number}"]
        assert (field.dtype, field.shape) == (leaf.dtype, (SLOTS, layout.rows, *leaf.shape))
    for number, leaf in enumerate(layout.actions):
        assert fields[f"action/{number}"].nbytes == layout.rows * leaf.items * ACTION_ITEM_BYTES
        assert fields[f"action_code/{number}"].shape == (layout.rows,)
    assert len(fields) == len(ROW_WORDS) + 7 + len(layout.observations) + 2 * len(layout.actions)


@pytest.mark.parametrize(
    "dtype",
    ["O", "|O", "V8", "<U1", "|S3", "<M8[s]", "<m8", "<c8", "f4,f4", "<f4\n", "", "i3", None, 4, "2f4", "(2,)f4"],
)
def test_leaf_of_what_is_no_number_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="booleans, integers and floats"):
        Leaf(dtype, (2,))


@pytest.mark.parametrize(
    "shape", [(-1,), (1.0,), (True,), ("2",), (1 << 31,), (1 << 16, 1 << 16), (0, 1 << 20, 1 << 20), (1,) * 31]
)
def test_leaf_that_no_array_can_be_is_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="a leaf"):
        Leaf("<f4", shape)


@pytest.mark.parametrize("found", [[], ["<f4"], ["<f4", 3], ["<f4", None], ["<f4", [2], 1]])
def test_malformed_description_of_a_leaf_is_refused(found: Any) -> None:
    with pytest.raises(ValueError, match="a dtype and a list"):
        Leaf.from_wire(found)


def test_layout_has_a_limit_of_leaves_and_no_observation_without_a_size() -> None:
    most = (Leaf("|b1", ()),) * LEAVES_MAX
    Layout(1, most, (*most[1:], OBJECT), 0)
    for observations, actions in (((*most, most[0]), ()), ((), (*most, OBJECT)), ((OBJECT,), ())):
        with pytest.raises(ValueError, match=r"leaves; at most|no fixed size"):
            Layout(1, observations, actions, 0)


def test_observation_has_the_bytes_of_its_leaves() -> None:
    layout = Layout(3, (Leaf("<f4", (2, 5)), Leaf("|u1", (7,))), (), 0)
    assert layout.row_bytes() == 47


def test_results_are_rewards_then_terminations_then_truncations() -> None:
    results = bytearray(np.array([0.5, -1.0, 2.0]).tobytes() + bytes([1, 0, 0]) + bytes([1, 0, 1]))
    rewards, terminations, truncations = split_results(results, 3)
    assert rewards.tolist() == [0.5, -1.0, 2.0]
    assert terminations.tolist() == [True, False, False] and truncations.tolist() == [True, False, True]
    rewards[1] = 7.0
    assert np.frombuffer(results, np.float64, 3)[1] == 7.0  # a view
    with pytest.raises(ValueError, match="30 bytes of results for 2 rows"):
        split_results(results, 2)


def test_part_of_a_batch_is_whole_shares() -> None:
    assert are_whole_workers([0, 2, 4], 5, 2) and are_whole_workers([3, 1], 5, 2) and are_whole_workers(range(5), 5, 2)
    assert not are_whole_workers([0, 2], 5, 2) and not are_whole_workers([1, 0, 3], 5, 2)
    assert "[[0, 2, 4], [1, 3]]" in whole_workers_text(5, 2)
