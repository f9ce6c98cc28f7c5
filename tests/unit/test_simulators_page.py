"""The page of simulators has a line for each package that the script tries."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tests/frameworks/simulators"))
    yield importlib.import_module("packages"), importlib.import_module("page")
    for name in ("packages", "page"):
        del sys.modules[name]


def test_page_has_a_line_for_each_package(tried: Any) -> None:
    packages, _ = tried
    lines = (ROOT / "server/docs/simulators.md").read_text().splitlines()
    assert [line[2:].partition(":")[0] for line in lines if line.startswith("- ")] == [
        package.name for package in packages.PACKAGES
    ]


def test_line_says_what_was_found_on_each_way_where_they_differ(tried: Any) -> None:
    _, page = tried
    equal = dict.fromkeys(page.WAYS, "equal")
    written = page.listed([{"package": "crafter", **equal}, {"package": "minigrid", **equal, "tcp": "differs"}])
    assert "- crafter: `crafter_env`; gym before" in written and "not tried" in written
    line = next(line for line in written.splitlines() if line.startswith("- minigrid:"))
    assert "private: equal; private again: equal; tcp: differs; tcp again: equal" in line
    assert "cannot be installed: no wheel" in page.listed([{"package": "nle", "why": "no wheel"}])
