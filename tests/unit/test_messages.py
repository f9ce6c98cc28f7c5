from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from envhub_server.ipc import control
from envhub_server.ipc.control import CONTROL, Build, RowFailed
from hypothesis import given, settings
from hypothesis import strategies as st

from envhub.frozen import Frozen
from envhub.protocol import messages
from envhub.protocol.messages import (
    REPLIES,
    REQUESTS,
    Call,
    Close,
    Failure,
    Hello,
    Made,
    Make,
    ProgramEnvironment,
    Reset,
    SetAttr,
    Welcome,
)
from envhub.values import codec

WIRE = sorted({*REQUESTS.values(), *REPLIES.values()}, key=lambda kind: kind.__name__)

FULL: list[Any] = [
    Hello("0.1.0"),
    Make(4, "CartPole-v1", b"k", b"f", 2, "SameStep", "different", ProgramEnvironment(["/x"], "/", {"A": "1"}, b"r")),
    Reset([1, None, 3], [True, False, True], b"o"),
    Call("render", b"a"),
    SetAttr("gravity", [b"1", b"2"]),
    Close(True),
    Welcome("0.1.0", "1", True, {"envs_per_session_max": 4}, "box", 7),
    Made(2, 1, [b"observations"], b"actions", b"m", "rgb_array", b"s"),
    Failure("env_raised", "env", "no", 3, 1, "builtins.ValueError", b"a", "tb", "log"),
]


@pytest.mark.parametrize("message", FULL, ids=lambda message: type(message).__name__)
def test_message_is_read_as_it_was_written(message: Any) -> None:
    assert messages.unpack(type(message), messages.pack(message)) == message


def test_large_bytes_are_passed_on_without_a_copy() -> None:
    large = bytes(codec.PIECE_BYTES)
    message = Build(0, [0], "x", b"small", large, "", [], "NextStep", False)
    pieces = control.pack(message)
    assert any(piece is large for piece in pieces) and len(pieces) == 3
    assert control.unpack(b"".join(pieces)) == message


@pytest.mark.parametrize("kind", WIRE, ids=lambda kind: kind.__name__)
def test_field_with_a_default_may_be_missing_and_one_without_may_not(kind: Any) -> None:
    wanted = {field.name: field for field in dataclasses.fields(kind)}
    needed = {
        name: example(kind, name)
        for name, field in wanted.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    assert messages.unpack(kind, codec.encode(needed)) == kind(**needed)
    for missing in needed:
        with pytest.raises(codec.DecodeError, match=missing):
            messages.unpack(kind, codec.encode({name: value for name, value in needed.items() if name != missing}))


def example(kind: Any, name: str) -> Any:
    """A value that the field accepts."""
    hint = str(kind.__annotations__[name])
    for start, value in {
        "str": "x",
        "int": 1,
        "float": 1.0,
        "bytes": b"x",
        "bool": True,
        "Dict": {},
        "List": [],
        "ProgramOrigin": {},
    }.items():
        if hint.startswith(start):
            return value
    raise AssertionError(hint)


@pytest.mark.parametrize("kind", WIRE, ids=lambda kind: kind.__name__)
def test_field_that_this_version_does_not_know_is_ignored(kind: Any) -> None:
    message = next((message for message in FULL if type(message) is kind), None)
    fields = {} if message is None else dataclasses.asdict(message)
    if message is None and any(field.default is dataclasses.MISSING for field in dataclasses.fields(kind)):
        fields = {field.name: example(kind, field.name) for field in dataclasses.fields(kind)}
    known = messages.unpack(kind, codec.encode(fields))
    assert messages.unpack(kind, codec.encode({**fields, "of_version_1_9": [1, {"a": b""}]})) == known


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Make, "num_envs", "4"),
        (Make, "num_envs", 4.0),
        (Make, "num_envs", True),
        (Make, "num_envs", None),
        (Make, "heartbeat_s", True),
        (Make, "heartbeat_s", "1"),
        (Make, "heartbeat_s", 1 << 70),
        (Make, "name", b"CartPole-v1"),
        (Make, "kwargs", "text"),
        (Make, "num_workers", "2"),
        (Make, "program_environment", [1]),
        (Make, "program_environment", {"sys_path": []}),
        (Make, "program_environment", {"sys_path": [], "cwd": 1, "environ": {}}),
        (Make, "program_environment", {"sys_path": [b"/x"], "cwd": "/", "environ": {}}),
        (Make, "program_environment", {"sys_path": [], "cwd": "/", "environ": {"A": 1}}),
        (Reset, "seeds", 1),
        (Reset, "seeds", ["1"]),
        (Reset, "seeds", [True]),
        (Reset, "mask", [1, 0]),
        (Reset, "mask", None),
        (Reset, "options", {}),
        (SetAttr, "values", [1]),
        (SetAttr, "values", b"1"),
        (Close, "terminate", 1),
        (Close, "terminate", None),
        (Failure, "env_index", "0"),
        (Welcome, "limits", {"a": "1"}),
        (Made, "observation_spaces", [[]]),
        (Made, "action_space", []),
    ],
)
def test_field_of_another_type_is_refused_and_named(kind: Any, field: str, value: Any) -> None:
    honest = next(message for message in FULL if type(message) is kind)
    with pytest.raises(
        codec.DecodeError,
        match=kind.__name__ if field != "program_environment" else "ProgramEnvironment|program_environment",
    ):
        messages.unpack(kind, codec.encode({**dataclasses.asdict(honest), field: value}))


def test_integer_of_msgpack_is_a_float_where_one_is_wanted() -> None:
    for number in (0, 5, -(1 << 63), (1 << 64) - 1):
        found = messages.unpack(Make, codec.encode({"num_envs": 1, "heartbeat_s": number}))
        assert type(found.heartbeat_s) is float and found.heartbeat_s == float(number)


@pytest.mark.parametrize("value", [None, 1, "x", [], [["num_envs", 1]], {1: 2}])
def test_message_that_is_no_map_of_names_is_refused(value: Any) -> None:
    with pytest.raises(codec.DecodeError):
        messages.unpack(Make, codec.encode(value))


# --- control messages -------------------------------------------------------------------------------------------------


def test_control_message_is_read_as_it_was_written() -> None:
    failure = Failure("env_raised", "env", "no", 3)
    build = Build(0, [0, 1], "CartPole-v1", b"", b"", "", [], "NextStep", False)
    for message in (RowFailed(failure), build, control.Mapped(), control.RowInfo(1, b"x")):
        assert control.unpack(b"".join(control.pack(message))) == message


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        ["Mapped"],
        ["Mapped", {}, 1],
        ["Nothing", {}],
        ["Mapped", []],
        [[], {}],
        [{}, {}],
        [1, {}],
        ["Make", {}],
    ],
)
def test_control_message_without_a_known_name_and_a_map_is_refused(value: Any) -> None:
    with pytest.raises(codec.DecodeError):
        control.unpack(codec.encode(value))


@pytest.mark.parametrize("name", sorted(CONTROL))
def test_control_message_with_a_wrong_field_is_refused(name: str) -> None:
    fields = dataclasses.fields(CONTROL[name])
    if fields:
        with pytest.raises(codec.DecodeError, match=fields[0].name):
            control.unpack(codec.encode([name, {fields[0].name: [[]]}]))


# --- rows -------------------------------------------------------------------------------------------------------------

pairs = st.dictionaries(st.integers(0, 2**32 - 2), st.binary(max_size=20), max_size=5).map(lambda d: list(d.items()))


@settings(deadline=None)
@given(pairs)
def test_rows_are_read_as_they_were_joined(rows: list[tuple[int, bytes]]) -> None:
    assert messages.unpack_rows(messages.pack_rows(rows), 2**32) == rows


def test_rows_frame_cut_anywhere_between_rows_and_their_ends_is_refused() -> None:
    frame = messages.pack_rows([(0, b"abc"), (1, b"de")])
    for end in range(1, len(frame)):
        if end != 11:  # exactly the first row
            with pytest.raises(codec.DecodeError):
                messages.unpack_rows(frame[:end], 100)


@pytest.mark.parametrize("rows", [[(2, b"")], [(0, b""), (1, b""), (1, b"")]])
def test_more_rows_than_there_are_are_refused(rows: list[tuple[int, bytes]]) -> None:
    with pytest.raises(codec.DecodeError, match="more than each of 2"):
        messages.unpack_rows(messages.pack_rows(rows), 2)


def test_places_of_factories_follow_their_pickle() -> None:
    whole = messages.append_offsets(b"abcdef", [(0, 2), (2, 6)])
    assert messages.places_of(whole) == (2, 6) and messages.places_of(b"abcdef") == (0, 6)
    assert [messages.offset_of(whole, row) for row in range(2)] == [(0, 2), (2, 6)]
    assert messages.offset_of(b"abcdef", 0) is None


# --- ``Frozen`` against what ``dataclass(frozen=True)`` makes ---------------------------------------------------------


class Point(Frozen):
    """A point."""

    x: int
    tags: tuple[str, ...] = ()
    notes: dict[str, int] = dataclasses.field(default_factory=dict)


class Pixel(Point):
    """A point with a color."""

    color: str = "red"


@dataclasses.dataclass(frozen=True)
class Reference:
    """A point, too."""

    x: int
    tags: tuple[str, ...] = ()


def test_fields_and_their_defaults_are_those_of_a_dataclass() -> None:
    assert [field.name for field in dataclasses.fields(Pixel)] == ["x", "tags", "notes", "color"]
    assert Point(1, notes={"a": 1}) == dataclasses.replace(Point(2, notes={"a": 1}), x=1)
    assert Point(1).notes is not Point(1).notes
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    assert Pixel.__match_args__ == ("x", "tags", "notes", "color")


def test_only_an_equal_one_of_the_same_class_is_equal() -> None:
    assert Point(1) == Point(1) != Point(2)
    assert Point(1) != Pixel(1) and Point(1) != Reference(1) and Point(1) != 1


def test_hash_is_that_of_the_fields() -> None:
    class Name(Frozen):
        """A name."""

        text: str = ""

    assert len({Name("a"), Name("a"), Name("b")}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(1))
