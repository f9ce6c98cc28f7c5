"""Which attributes are set again, and how many are kept."""

from __future__ import annotations

from envhub_server.ipc.control import BYTES_MAX, ENTRY_BYTES, SetAttributes, SetAttrRows


def test_last_values_are_set_again_in_the_order_in_which_they_were_set() -> None:
    kept = SetAttributes()
    for message in (
        SetAttrRows([0, 1], "mass", b"one"),
        SetAttrRows([1, 2], "wind", each=[b"1", b"2"]),
        SetAttrRows([0], "mass", b"two"),
    ):
        assert kept.note(message)
    assert kept.again([0, 1]) == [
        SetAttrRows([1], "wind", each=[b"1"]),
        SetAttrRows([0, 1], "mass", each=[b"two", b"one"]),
    ]
    assert not kept.again([3])


def test_value_without_room_takes_the_place_of_the_one_before() -> None:
    kept = SetAttributes()
    largest = bytes(BYTES_MAX - 2 * ENTRY_BYTES - 4)
    assert kept.note(SetAttrRows([0], "map", largest)) and kept.note(SetAttrRows([0], "mass", b"four"))
    assert not kept.note(SetAttrRows([0], "mass", b"fives"))
    assert [message.name for message in kept.again([0])] == ["map"]
    assert kept.note(SetAttrRows([0], "map", b"small")) and kept.note(SetAttrRows([0], "mass", b"fives"))
