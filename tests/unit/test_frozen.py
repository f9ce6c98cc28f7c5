"""``Frozen`` against what ``dataclass(frozen=True)`` makes of the same class."""

from __future__ import annotations

import dataclasses

import pytest

from envhub.frozen import Frozen


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
