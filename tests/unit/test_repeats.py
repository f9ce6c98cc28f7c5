"""Which lines of a log are written of many, and what is told of the others."""

from __future__ import annotations

import itertools

import pytest
from envhub_server.repeats import (
    FIELD_CHARS_MAX,
    LINES_MAX,
    ORIGINS_MAX,
    OTHERS,
    REPEAT_S,
    Repeats,
    network_of,
    shortened,
)


def test_first_of_equal_lines_is_written_and_the_others_are_told_of_once() -> None:
    repeats = Repeats()
    admitted = [repeats.admits("refused", {"client": "a"}, "::1", "why", now_s) for now_s in (0.0, 1.0, REPEAT_S - 1)]
    assert admitted == [True, False, False] and repeats.pending
    assert repeats.take_left_out(REPEAT_S - 1) == []
    assert repeats.take_left_out(REPEAT_S) == [{"of": "refused", "client": "a", "origin": "::1", "lines": 2}]
    assert repeats.take_left_out(REPEAT_S) == [] and not repeats.pending
    assert repeats.admits("refused", {"client": "a"}, "::1", "why", REPEAT_S)


def test_lines_that_all_differ_are_bounded_and_the_next_period_has_as_many() -> None:
    repeats, reasons = Repeats(), itertools.count()
    for begin_s in (0.0, REPEAT_S):
        assert sum(repeats.admits("refused", {}, "", next(reasons), begin_s) for _ in range(5000)) == LINES_MAX
    assert repeats.take_left_out(2 * REPEAT_S) == [{"of": "refused", "lines": 2 * (5000 - LINES_MAX)}]


def test_lines_of_no_kind_are_bounded_too() -> None:
    repeats = Repeats()
    assert sum(repeats.admits("worker_started", {}, "", None, 0.0, lines_max=7) for _ in range(50)) == 7


def test_flood_of_one_client_or_origin_hides_no_line_of_another() -> None:
    repeats = Repeats()
    for reason in range(5000):
        repeats.admits("refused", {"client": "mallory"}, "10.0.0.1", reason, 0.0)
    assert repeats.admits("refused", {"client": "alice"}, "10.0.0.1", "why", 1.0)
    assert repeats.admits("refused", {"client": "mallory"}, "10.0.0.2", "why", 1.0)
    assert repeats.admits("connected", {"client": "mallory"}, "10.0.0.1", "why", 1.0)


def test_lines_from_any_number_of_origins_are_bounded_and_all_are_counted() -> None:
    repeats = Repeats()
    origins = [f"10.1.{number // 256}.{number % 256}" for number in range(5000)]
    written = sum(repeats.admits("refused", {}, origin, (origin, "why"), 0.0) for origin in origins)
    assert written == ORIGINS_MAX + LINES_MAX
    assert repeats.take_left_out(REPEAT_S) == [{"of": "refused", "origin": OTHERS, "lines": 5000 - written}]
    assert repeats.admits("refused", {}, origins[-1], (origins[-1], "why"), REPEAT_S)
    assert len(vars(repeats)["_periods"]) == 1 and sum(vars(repeats)["_origins"]["refused"].values()) == 1


def test_lines_left_out_are_pending_until_they_are_told_though_their_period_has_ended() -> None:
    repeats = Repeats()
    for _ in range(2):
        repeats.admits("refused", {}, "", "why", 0.0)
    assert repeats.admits("connected", {}, "", "why", REPEAT_S) and repeats.pending
    assert repeats.take_left_out(REPEAT_S) == [{"of": "refused", "lines": 1}] and not repeats.pending


def test_flood_from_many_origins_hides_no_line_of_one_that_was_there_before() -> None:
    repeats = Repeats()
    for number in range(5000):
        repeats.admits("refused", {}, str(number), number, 0.0)
    assert repeats.admits("refused", {}, "0", "why", 1.0) and not repeats.admits("refused", {}, "4999", "why", 1.0)


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


def test_long_texts_are_shortened() -> None:
    assert len(shortened("x" * 10**6)) == FIELD_CHARS_MAX
    assert shortened("x" * FIELD_CHARS_MAX) == "x" * FIELD_CHARS_MAX
    assert shortened("short") == "short" and shortened(3) == 3
