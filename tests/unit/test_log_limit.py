"""Each event of the log has one sentence; equal lines are written once in a while, and no peer makes the log grow."""

from __future__ import annotations

import json
import select

import pytest
from envhub_server.log import LIMIT_S, LINES_MAX, SOURCES_MAX, LineLimit, network_of
from envhub_server.processes.worker_output import TEXT_CHARS_MAX, OutputEvents
from hypothesis import given
from hypothesis import strategies as st
from logged_events import PAGE, events, updated


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


@pytest.mark.parametrize("name", events())
def test_event_has_one_sentence_and_lines_that_are_limited_alike(name: str) -> None:
    event = events()[name]
    assert len(event.sentences) == 1, 'write "# Event: ..." above one of its calls'
    assert event.sentences[0].endswith(".") and event.levels and len(event.once_per) <= 1


def test_list_is_made_of_the_calls() -> None:
    page = PAGE.read_text()
    assert all(f"\n- `{name}` (" in page for name in events())
    assert page == updated(page), "run: python tests/support/logged_events.py"


# --- what a worker prints ---------------------------------------------------------------------------------------------


LABEL = {"session": "ab12", "worker": 3, "pid": 77}


def texts(events: bytes) -> list[str]:
    return [json.loads(line)["text"] for line in events.splitlines()]


def test_event_says_who_printed_what_where() -> None:
    (line,) = OutputEvents("stderr", LABEL).lines(b"two\nlines\n").splitlines()
    told = json.loads(line)
    assert told.pop("timestamp")
    assert told == {**LABEL, "event": "output", "level": "info", "stream": "stderr", "text": "two\nlines"}


def test_line_is_told_once_it_has_ended() -> None:
    events = OutputEvents("stdout", LABEL)
    assert texts(events.lines(b"one\ntw")) == ["one"]
    assert texts(events.lines(b"o\nthree")) == ["two"]
    assert texts(events.rest()) == ["three"] and events.rest() == b""


def test_line_without_an_end_is_told_in_pieces() -> None:
    events = OutputEvents("stdout", LABEL)
    assert events.lines(b"x" * (TEXT_CHARS_MAX - 1)) == b""
    assert texts(events.lines(b"xx")) == ["x" * TEXT_CHARS_MAX, "x"]


def test_character_in_two_pieces_of_a_line_without_an_end_is_whole() -> None:
    events, printed = OutputEvents("stdout", LABEL), "\N{ROCKET}".encode() * TEXT_CHARS_MAX
    assert "".join(texts(events.lines(printed[:-2]) + events.lines(printed[-2:]) + events.rest())) == printed.decode()


@pytest.mark.parametrize("text", ["\0" * 20_000, "\n" * 20_000, "ä" * 20_000, "a line\n" * 5000, "\N{ROCKET}" * 9000])
def test_no_event_is_too_long_for_a_pipe_and_none_is_lost(text: str) -> None:
    found = OutputEvents("stdout", LABEL).lines(text.encode() + b"\n")
    assert all(len(line) < select.PIPE_BUF for line in found.splitlines())
    assert "".join(texts(found)).replace("\n", "") == text.replace("\n", "")


@given(st.lists(st.binary()))
def test_whatever_is_printed_in_whatever_pieces_is_valid_json(pieces: list[bytes]) -> None:
    events = OutputEvents("stdout", LABEL)
    found = b"".join([*map(events.lines, pieces), events.rest()])
    told = "".join(texts(found))
    whole = b"".join(pieces).decode("utf-8", "backslashreplace")
    assert told.replace("\n", "") == whole.replace("\n", "")
