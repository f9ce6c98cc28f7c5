"""PROTOCOL.md, section by section and table by table."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "envhub/protocol/PROTOCOL.md").read_text()
_BAR = re.compile(r"(?<!\\)\|")
_TABLE = re.compile(r"^\|.*\n\|[-| ]+\n((?:\|.*\n?)+)", re.M)


def titles() -> list[str]:
    """The headings, of any level, in order."""
    return re.findall(r"^#+ (.*)$", TEXT, re.M)


def section(title: str) -> str:
    """The text under a heading, up to the next heading of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", TEXT, re.M | re.S)
    assert found is not None, f"no section {title!r}"
    return found[1]


def tables(title: str) -> list[list[list[str]]]:
    """The cells of each table of a section, without its head."""
    bodies = _TABLE.findall(section(title))
    return [[[cell.strip() for cell in _BAR.split(line[1:-1])] for line in body.splitlines()] for body in bodies]


def table(title: str) -> list[list[str]]:
    """The cells of a section's first table; code marks around a cell are taken off."""
    found = tables(title)
    assert found, f"no table under {title!r}"
    return [[cell.strip("`") for cell in row] for row in found[0]]


def diagram(title: str) -> str:
    """The diagram of a section."""
    (found,) = re.findall(r"^```text\n(.*?)^```", section(title), re.M | re.S)
    return str(found)


def names(cell: str) -> list[str]:
    """The names of a cell that are separated by commas."""
    return [name.strip(" `") for name in cell.split(",")]


def marked(text: str) -> list[str]:
    """The parts of a text that are between code marks."""
    return re.findall(r"`([^`]+)`", text)
