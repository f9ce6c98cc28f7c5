"""The language of code and pages: first words of docstrings, banned words and names, and the length of sentences.

Each file of ``LEFT`` has, by path, the number of places that still break its rule. It only shrinks:
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
LEFT = {rule: Path(__file__).with_name(f"{rule}_left.json") for rule in ("voice", "names", "sentences")}
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


# A result has the name of its contents, and a function is a verb.
NAMES = frozenset(["found", "told", "known", "beyond", "granted", "lack", "stay", "those"])
SENTENCE_WORDS_MAX = 40
CODE_BLOCK = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
RST_TABLE = re.compile(r"^ *=+(?: +=+)+$.*^ *=+(?: +=+)+$", re.DOTALL | re.MULTILINE)
# Tables, headings and literal blocks of docstrings are not sentences.
NO_PROSE = re.compile(r"^(\s*[|#=+].*| {4,}.*)$", re.MULTILINE)
PARAGRAPH = re.compile(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s|^\s*\w+(?:, \w+)*:(?=\s)", re.MULTILINE)
SENTENCE_END = re.compile(r"[.:;?!][)\"'`*]*\s")


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def names(source: str) -> Iterator[str]:
    """The names of functions, arguments, variables and attributes, where they are defined or assigned."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def long_sentences(text: str) -> list[str]:
    prose = NO_PROSE.sub("", RST_TABLE.sub("", CODE_BLOCK.sub("", text)))
    sentences = (each for paragraph in PARAGRAPH.split(prose) for each in SENTENCE_END.split(paragraph))
    return [each for each in sentences if len(each.split()) > SENTENCE_WORDS_MAX]


def counted() -> dict[str, dict[str, int]]:
    """By rule and path, the number of places that break the rule; only paths that have any."""
    counts: dict[str, Counter[str]] = {rule: Counter() for rule in LEFT}
    for path in [*CODE, *PAGES]:
        text, name = path.read_text(), str(path.relative_to(ROOT))
        is_code = path.suffix == ".py"
        prose = list(docstrings(text)) if is_code else [text]
        counts["voice"][name] = len(WORDS.findall(text))
        counts["voice"][name] += is_code * sum(bool(NO_FIRST_WORD.match(each)) for each in prose)
        counts["names"][name] = sum(each.strip("_") in NAMES for each in names(text)) if is_code else 0
        counts["sentences"][name] = sum(len(long_sentences(each)) for each in prose)
    return {rule: {name: n for name, n in sorted(by_name.items()) if n} for rule, by_name in counts.items()}


def left(rule: str) -> dict[str, int]:
    return dict(json.loads(LEFT[rule].read_text()))


@pytest.mark.parametrize(
    "text, is_refused",
    [("What a row has.", True), ("True if a row is done.", False), ("``As`` told.", True), ("Assign a row.", False)],
)
def test_first_words_are_told_apart(text: str, is_refused: bool) -> None:
    assert bool(NO_FIRST_WORD.match(text)) == is_refused


@pytest.mark.parametrize(
    "source, banned",
    [
        ("found = 1", ["found"]),
        ("def _told(known): pass", ["_told", "known"]),
        ("self._known = {}", ["_known"]),
        ("for those in rows: pass", ["those"]),
        ("outcome = log.found", []),
    ],
)
def test_banned_names_are_those_that_are_defined(source: str, banned: list[str]) -> None:
    assert [each for each in names(source) if each.strip("_") in NAMES] == banned


def test_long_sentence_is_one_of_prose() -> None:
    long, short = " ".join(["word"] * 41), " ".join(["word"] * 40)
    assert [*map(len, map(long_sentences, (long, f"A. {short}. {short}. ", f"{short}\n\n{short}")))] == [1, 0, 0]
    assert long_sentences(f"```\n{long}\n```\n\n| {long} |\n# {long}\n\n- {short}\n- {short}\n") == []


@pytest.mark.parametrize("rule", LEFT)
def test_no_file_reads_worse_than_it_did(rule: str, now: dict[str, dict[str, int]]) -> None:
    allowed = left(rule)
    worse = {name: (allowed.get(name, 0), n) for name, n in now[rule].items() if n > allowed.get(name, 0)}
    assert not worse, "use the field's words and names, in sentences of at most 40 words"
    better = {name: (n, now[rule].get(name, 0)) for name, n in allowed.items() if n > now[rule].get(name, 0)}
    assert not better, "run this file, which lowers the numbers"


@pytest.fixture(scope="module")
def now() -> dict[str, dict[str, int]]:
    return counted()


if __name__ == "__main__":
    for rule, counts in counted().items():
        allowed = left(rule)
        less = {name: min(number, allowed.get(name, 0)) for name, number in counts.items()}
        LEFT[rule].write_text(json.dumps({name: number for name, number in less.items() if number}, indent=0) + "\n")
