"""The table of the log's events has what the code emits, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from envhub_server import log_events
from envhub_server.log_events import LOG_EVENTS

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "server/envhub_server").rglob("*.py"))]
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}
LOGGED_BY = {*LEVELS, "tell", "Warn", "Notify", "json_line"}  # functions whose first argument is an event


class Emitted(NamedTuple):
    """A call that emits an event."""

    by: str
    event: str
    fields: set[str]
    has_others: bool  # besides these fields
    place: str


def emitted(names: set[str], receivers: tuple[str, ...] = ()) -> Iterator[Emitted]:
    """The calls of functions of these names, or of methods of these names of these objects."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if name in names and (not receivers or owner.endswith(receivers)):
                fields = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                others = any(keyword.arg is None for keyword in node.keywords)
                for event in texts(node.args[0]):
                    yield Emitted(name, event, fields, others, f"{file.name}:{node.lineno}")


def texts(node: ast.expr) -> list[str]:
    """The events that this may be, as far as the code names them there."""
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


@cache  # and not when this is imported, which every process of a run of the tests does
def logged() -> list[Emitted]:
    return [each for each in emitted(LOGGED_BY) if each.event.replace("_", "").isalpha()]


def test_every_event_that_is_logged_is_in_the_table_with_its_level_and_fields() -> None:
    assert {each.event for each in logged()} == LOG_EVENTS.keys()
    for each in logged():
        event = LOG_EVENTS[each.event]
        assert LEVELS.get(each.by, event.levels[0]) in event.levels, each
        assert each.fields <= {*event.fields, "exc_info"}, each
    for event, logged_as in LOG_EVENTS.items():
        calls = {each.by for each in logged() if each.event == event}
        levels = {LEVELS[by] for by in calls & LEVELS.keys()}
        assert not levels or "tell" in calls or levels == {*logged_as.levels}, event


@pytest.mark.parametrize("event", [name for name, event in LOG_EVENTS.items() if event.repeats is not None])
def test_fields_by_which_lines_are_told_apart_are_fields_of_the_event(event: str) -> None:
    assert {*(LOG_EVENTS[event].repeats or ())} <= {*LOG_EVENTS[event].fields}


def test_page_is_that_of_the_tables() -> None:
    page = (ROOT / "server/docs/log_events.md").read_text()
    assert page == log_events.page(), "run: python -m envhub_server.log_events > server/docs/log_events.md"
