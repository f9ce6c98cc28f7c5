"""Names of fleets and of their actors, and lines of the output of a hub."""

from __future__ import annotations

import os

import pytest

from envhub.errors import AddressError
from envhub.fleet.hub_process import LINE_BYTES_MAX, LineReader
from envhub.fleet.names import actor_name, check_fleet_name, fleet_of, hub_name, index_of


def test_actor_is_of_one_fleet_and_one_hub() -> None:
    assert (actor_name("sims", 12), hub_name("sims", 12)) == ("envhub:sims:12", "sims/12")
    assert (fleet_of("envhub:sims:12"), index_of("envhub:sims:12", "sims")) == ("sims", 12)
    for name in ("envhub:other:12", "envhub:sims", "envhub:sims:keeper", "sims:12"):
        assert index_of(name, "sims") is None
    assert [fleet_of(name) for name in ("envhub:sims", "envhub:sims:x", "other:sims:1", "envhub:a:b:1")] == [None] * 4


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "-a", "a b", "a" * 57, "head:10001"])
def test_name_that_no_fleet_can_have_is_refused(name: str) -> None:
    with pytest.raises(AddressError, match="is no name for a fleet"):
        check_fleet_name(name)


def test_lines_of_a_pipe_are_taken_whole_and_a_long_one_in_parts() -> None:
    taken: list[str] = []
    reading, writing = os.pipe()
    with open(reading, "rb") as stream:
        reader = LineReader(stream, taken.append)
        with open(writing, "wb", buffering=0) as writer:
            assert not reader.read()
            writer.write(b"one\ntw")
            assert reader.read()
            assert taken == ["one"]
            writer.write(b"o\n" + b"x" * (LINE_BYTES_MAX + 1))
            assert reader.read()
            writer.write(b"\xff\nlast")
        reader.finish()
    assert taken == ["one", "two", "x" * LINE_BYTES_MAX, "\ufffd", "last"]
