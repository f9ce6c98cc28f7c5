"""What a worker prints as events: whole lines, each short enough for a pipe to take it at once."""

from __future__ import annotations

import json
import select

import pytest
from envhub_server.processes.worker_output import TEXT_CHARS_MAX, OutputEvents
from hypothesis import given
from hypothesis import strategies as st

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
