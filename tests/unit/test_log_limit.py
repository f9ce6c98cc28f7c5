"""The limit of the log's lines: equal ones are written once in a while, and no peer makes the log grow."""

from __future__ import annotations

import pytest
from envhub_server.log import LIMIT_S, LINES_MAX, SOURCES_MAX, LineLimit, network_of


def test_first_of_equal_lines_is_written_in_each_period() -> None:
    limit = LineLimit()
    assert [limit.admits("refused", "a", ("why",), at_s) for at_s in (0.0, 1.0, LIMIT_S - 0.1)] == [True, False, False]
    assert limit.admits("refused", "a", ("another",), 1.0) and limit.admits("made", "a", ("why",), 1.0)
    assert limit.admits("refused", "a", ("why",), LIMIT_S) and not limit.admits("refused", "a", ("why",), LIMIT_S)


def test_lines_that_all_differ_are_bounded_and_the_next_period_has_as_many() -> None:
    limit = LineLimit()
    for period in range(2):
        assert sum(limit.admits("refused", "a", number, period * LIMIT_S) for number in range(5000)) == LINES_MAX


def test_flood_of_one_source_hides_no_line_of_another() -> None:
    limit = LineLimit()
    for number in range(5000):
        limit.admits("refused", "a", (number,), 0.0)
    assert limit.admits("refused", "b", (1,), 0.0) and limit.admits("made", "a", (1,), 0.0)


def test_lines_of_any_number_of_sources_are_bounded_and_hide_none_of_one_that_was_there_before() -> None:
    limit = LineLimit()
    assert limit.admits("refused", "a", (0,), 0.0)
    written = sum(limit.admits("refused", f"host {number}", (number,), 0.0) for number in range(5000))
    assert written == SOURCES_MAX - 1 + LINES_MAX
    assert limit.admits("refused", "a", (1,), 0.0)


@pytest.mark.parametrize(
    ("origin", "network"),
    [
        ("localhost:1000:100:4711", "localhost:1000"),
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1:2:3:4%eth0", "fe80::"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("1000", "1000"),
        ("", ""),
    ],
)
def test_what_a_peer_can_vary_of_its_origin_does_not_count(origin: str, network: str) -> None:
    assert network_of(origin) == network
