"""The page of simulators names functions that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_functions_of_the_page_are_in_the_file_that_it_names() -> None:
    text = (ROOT / "tests/frameworks/simulators/factories.py").read_text()
    functions = {each.name for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)}
    lines = re.findall(r"^- [\w-]+: `([^`]+)`", (ROOT / "server/docs/simulators.md").read_text(), re.MULTILINE)
    assert len(lines) > 40
    assert {env for env in lines if ":" not in env} <= functions
