"""The language of code and pages: first words of docstrings, banned words and names, and the length of sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = [path for folder in ("envhub", "server", "client") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [
    *ROOT.glob("*.md"),
    *(path for folder in ("envhub", "server", "client", "docker") for path in (ROOT / folder).rglob("*.md")),
]
# A docstring begins with a verb, "True if" or a noun.
NO_FIRST_WORD = re.compile(r"\W*(What|Who|Whose|Whoever|Nobody|Whether|Where|How|When|Why|Which|As|Of)\b")
WORDS = re.compile(
    r"\b(whoever|nobody|who asks|that one|of one that|so many|anew|mend|mends|mended|owed|worn|beside|"
    r"cannot be had|came of it|by now)\b",
    re.IGNORECASE,
)


# A result has the name of its contents, and a function is a verb.
NAMES = re.compile(r"_*(found|told|known|beyond|granted|lack|stay|those|said|hear|heard|noted|shown|due|fit|alone)_*")
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
    assert [each for each in names(source) if NAMES.fullmatch(each)] == banned


def test_long_sentence_is_one_of_prose() -> None:
    long, short = " ".join(["word"] * 41), " ".join(["word"] * 40)
    assert [*map(len, map(long_sentences, (long, f"A. {short}. {short}. ", f"{short}\n\n{short}")))] == [1, 0, 0]
    assert long_sentences(f"```\n{long}\n```\n\n| {long} |\n# {long}\n\n- {short}\n- {short}\n") == []


def test_code_and_pages_have_the_words_and_names_of_the_field_in_sentences_of_at_most_40_words() -> None:
    broken = []
    for path in [*CODE, *PAGES]:
        text = path.read_text()
        is_code = path.suffix == ".py"
        prose = [*docstrings(text)] if is_code else [text]
        wrong = [*WORDS.findall(text), *(long for each in prose for long in long_sentences(each))]
        if is_code:
            wrong += [each for each in prose if NO_FIRST_WORD.match(each)]
            wrong += [each for each in names(text) if NAMES.fullmatch(each)]
        broken += [f"{path.relative_to(ROOT)}: {each}" for each in wrong]
    assert not broken
