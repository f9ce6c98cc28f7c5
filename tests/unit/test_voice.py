"""How code and pages read: the first word of docstrings, and words that a stranger to the project would not say.

``voice_left.json`` has the number of places in each file that still read otherwise. It only shrinks:
``python tests/unit/test_voice.py`` writes the numbers that have become smaller.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT = Path(__file__).with_name("voice_left.json")
CODE = [path for folder in ("envhub", "server", "client") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [
    *ROOT.glob("*.md"),
    *(path for folder in ("envhub", "server", "client", "docker") for path in (ROOT / folder).rglob("*.md")),
]
# A docstring begins with a verb, "True if" or a noun.
NO_FIRST_WORD = re.compile(r"\W*(What|Who|Whose|Whoever|Nobody|Whether|Where|How|When|Why|Which|As|Of)\b")
WORDS = re.compile(
    r"\b(whoever|nobody|who asks|that one|of one that|so many|anew|mend|mends|mended|owed|worn|beside)\b", re.IGNORECASE
)


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def counted() -> dict[str, int]:
    found: Counter[str] = Counter()
    for path in [*CODE, *PAGES]:
        text, name = path.read_text(), str(path.relative_to(ROOT))
        found[name] += len(WORDS.findall(text))
        if path.suffix == ".py":
            found[name] += sum(bool(NO_FIRST_WORD.match(each)) for each in docstrings(text))
    return {name: number for name, number in sorted(found.items()) if number}


@pytest.mark.parametrize(
    "text, is_refused",
    [("What a row has.", True), ("True if a row is done.", False), ("``As`` told.", True), ("Assign a row.", False)],
)
def test_first_words_are_told_apart(text: str, is_refused: bool) -> None:
    assert bool(NO_FIRST_WORD.match(text)) == is_refused


def test_no_file_reads_worse_than_it_did() -> None:
    left, now = json.loads(LEFT.read_text()), counted()
    worse = {name: (left.get(name, 0), number) for name, number in now.items() if number > left.get(name, 0)}
    assert not worse, "begin docstrings with a verb, 'True if' or a noun, and use the field's words"
    better = {name: (number, now.get(name, 0)) for name, number in left.items() if number > now.get(name, 0)}
    assert not better, "run this file, which lowers the numbers"


if __name__ == "__main__":
    left = json.loads(LEFT.read_text())
    less = {name: min(number, left.get(name, number)) for name, number in counted().items()}
    LEFT.write_text(json.dumps({name: number for name, number in less.items() if number}, indent=0) + "\n")
