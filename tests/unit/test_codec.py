from __future__ import annotations

import collections
import enum
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.codec_values import QUICK, Opaque, arrays, round_trip, same, text_and_time, values

from envhub.values import codec


class Mine(np.ndarray):
    """An array of a class that the codec does not know."""


# --- what it carries --------------------------------------------------------------------------------------------------


@QUICK
@given(values)
def test_whatever_is_encoded_is_decoded_as_it_was(value: Any) -> None:
    assert same(round_trip(value), value)


@QUICK
@given(arrays | text_and_time)
def test_decoded_arrays_are_fresh_writable_and_of_the_same_dtype_and_shape(array: np.ndarray) -> None:
    found = round_trip(array)
    assert same(found, array)
    assert found.flags.writeable and found.flags.owndata


def test_array_that_is_not_contiguous_is_carried() -> None:
    array = np.arange(24).reshape(4, 6)[::2, ::-3]
    assert same(round_trip(array), np.ascontiguousarray(array))
    assert same(round_trip(array.T), np.ascontiguousarray(array.T))


def test_text_scalars_become_python_text() -> None:
    assert round_trip(np.str_("left")) == "left"
    assert round_trip(np.bytes_(b"left")) == b"left"
    for ends_in_zero in (np.str_("a\0"), np.bytes_(b"a\0")):  # which an array would drop
        assert round_trip(ends_in_zero) == ends_in_zero


def test_named_tuples_and_dict_subclasses_become_plain_ones() -> None:
    point = collections.namedtuple("point", "x y")
    assert same(round_trip(point(1, 2)), (1, 2))
    assert same(round_trip(collections.OrderedDict(a=1)), {"a": 1})


def test_subclasses_of_numbers_and_text_travel_as_what_they_extend() -> None:
    class Number(enum.IntEnum):
        ONE = 1

    class Colour(str, enum.Enum):
        RED = "red"

    class Loud(str):
        def __str__(self) -> str:
            return self.upper()

    class Metres(float):
        pass

    class Blob(bytes):
        pass

    assert same(round_trip([Number.ONE, Colour.RED, Loud("a"), Metres(0.5), Blob(b"x")]), [1, "red", "a", 0.5, b"x"])


def test_buffers_become_bytes() -> None:
    assert round_trip([bytearray(b"ab"), memoryview(b"cd")]) == [b"ab", b"cd"]


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_random_generator_goes_on_where_it_was(name: str) -> None:
    generator = np.random.Generator(getattr(np.random, name)(7))
    generator.random(5)
    generator.integers(0, 9, 3, dtype=np.int32)  # half of a 64-bit draw stays behind
    found = round_trip({"np_random": generator})["np_random"]
    assert found.random(1000).tolist() == generator.random(1000).tolist()
    assert type(found.bit_generator).__name__ == name


def test_lone_surrogates_are_carried() -> None:
    text = b"/tmp/\xff".decode("utf-8", "surrogateescape")
    assert round_trip({text: [text, "\ud800"]}) == {text: [text, "\ud800"]}


# --- what it cannot carry ---------------------------------------------------------------------------------------------


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("not now")


UNCARRIED = [
    Opaque(),
    lambda: None,
    object,
    np.array([object()]),
    np.zeros(2, "i4,f8"),
    np.zeros((1,) * 17),
    np.zeros((1,) * 17, "U1"),
    np.zeros(1, np.clongdouble),
    np.void(b"ab"),
    np.random.RandomState(1),
]


@pytest.mark.parametrize("value", UNCARRIED, ids=lambda value: type(value).__name__)
def test_value_without_a_form_is_refused(value: Any) -> None:
    with pytest.raises(codec.EncodeError, match=type(value).__name__):
        codec.encode({"deep": [value]})


@pytest.mark.parametrize("value", UNCARRIED, ids=lambda value: type(value).__name__)
def test_value_without_a_form_travels_as_its_repr_where_that_is_allowed(value: Any) -> None:
    found = codec.decode(codec.encode({"deep": [value]}, codec.as_repr))
    assert found == {"deep": [repr(value)[: codec.REPR_CHARS_MAX]]}


def test_text_in_place_of_a_value_is_passed_on_as_such() -> None:
    found = round_trip(codec.Repr("<a simulator>"))
    assert type(found) is codec.Repr and repr(found) == "<a simulator>"


def test_repr_that_raises_does_not_fail_the_encoding() -> None:
    assert "RuntimeError" in codec.decode(codec.encode(Shy(), codec.as_repr))


def test_cycle_is_refused_or_ended_by_a_repr() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(codec.EncodeError):
        codec.encode(cycle)
    assert codec.decode(codec.encode(cycle, codec.as_repr)) == [1, {"again": repr(cycle)}]


@pytest.mark.parametrize("step", [1, -2])
def test_large_array_is_encoded_in_pieces_as_it_is_in_whole(step: int) -> None:
    array = np.arange(codec.PIECE_BYTES // 4)[::step]
    pieces = codec.encode_pieces(array)
    assert len(pieces) == 2 and same(codec.decode(b"".join(pieces)), np.ascontiguousarray(array))
    assert same(round_trip(array.view(Mine)), np.ascontiguousarray(array))
    with pytest.raises(codec.EncodeError):
        codec.encode_pieces(array.reshape((1,) * codec.NDIM_MAX + (-1,)))


def test_array_may_have_as_many_dimensions_as_the_limit() -> None:
    for dtype in (np.float64, "U1"):
        array = np.zeros((1,) * codec.NDIM_MAX, dtype)
        assert same(round_trip(array), array)


@pytest.mark.parametrize(
    "wrap", [lambda value: [value], lambda value: (value,), lambda value: {"k": value}, lambda value: {1: value}]
)
def test_nesting_is_carried_to_the_limit_and_refused_beyond(wrap: Any) -> None:
    value: Any = np.array(["an array is an extension of its own"])
    for _ in range(codec.DEPTH_MAX):
        value = wrap(value)
    assert same(round_trip(value), value)
    with pytest.raises(codec.EncodeError):
        codec.encode(wrap(value))
    assert codec.decode(codec.encode(wrap(value), codec.as_repr))


def test_pair_is_a_list_of_two_and_is_read_as_views() -> None:
    for sizes in ((0, 0), (255, 65535), (256, 65536), (1, 300)):
        pair = [b"a" * sizes[0], b"b" * sizes[1]]
        blob = codec.encode_pair(*pair)
        assert blob == codec.encode(pair) and [*map(bytes, codec.decode_pair(blob))] == pair
        for broken in (b"", blob[:-1], blob + b"x", b"\x93" + blob[1:], blob[:1], blob[:2], codec.encode(["a", "b"])):
            with pytest.raises(codec.DecodeError):
                codec.decode_pair(broken)


@pytest.mark.parametrize(
    "value", [[1, 1 << 70], {"a": 1, "b": -(1 << 64)}, ([1.0, None, 1 << 65], True), [True, "x", 3]]
)
def test_containers_of_plain_values_keep_large_integers(value: Any) -> None:
    found = codec.decode(codec.encode(value))
    assert found == value and type(found) is type(value)


def test_plain_items_are_packed_without_work_for_each() -> None:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        codec.encode({"list": list(range(10_000)), "map": dict.fromkeys(map(str, range(10_000)), 0.5)})
    finally:
        sys.setprofile(None)
    assert calls < 100


def test_generator_of_random_bits_that_only_a_program_knows_is_not_sent() -> None:
    class Own(np.random.PCG64):
        pass

    with pytest.raises(codec.EncodeError, match="Generator cannot be sent"):
        codec.encode(np.random.Generator(Own(1)))
