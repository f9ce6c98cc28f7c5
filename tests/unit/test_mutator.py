"""Mutants are small changes that can be imported, and the list of those that once were not noticed is up to date."""

from __future__ import annotations

import ast

import pytest
from mutation.mutator import mutants
from mutation.named import NAMED, Named
from mutation.runner import ROOT, kept, module_of
from mutation.targets import TARGETS

SOURCE = '''
LIMIT = 5

def judge(first, second=2):
    """Say, é, what is so."""
    assert first != second
    log.info("heard", first=1)
    if first < second and first.over:
        first.count += 1
        return min(first, LIMIT)
    return f"{first + 1}" if first in ("a", "b") else told(not first, by=second)
'''


def test_mutants_are_those_of_the_table() -> None:
    found = {mutant.name.partition(": ")[2] for mutant in mutants("x.py", SOURCE)}
    assert found == {
        "first < second -> first <= second",
        "first < second -> first >= second",
        "first < second and first.over -> first < second or first.over",
        "first < second and first.over -> first < second",
        "first < second and first.over -> first.over",
        "not first -> first",
        "first.count += 1 -> pass",
        "1 -> 2",
        "return min(first, LIMIT) -> return None",
        "min(first, LIMIT) -> first",
        "min(first, LIMIT) -> LIMIT",
        'return f"{first + 1}" if first in ("a", "b") else told(not first, by=second) -> return None',
        "first in (\"a\", \"b\") -> first not in ('a', 'b')",
        '("a", "b") -> (\'b\',)',
        '("a", "b") -> (\'a\',)',
        "told(not first, by=second) -> told(not first)",
    }


def test_equal_changes_of_a_function_have_names_of_their_own() -> None:
    found = [mutant.name for mutant in mutants("x.py", "def f():\n    g(1)\n    h(1)\n")]
    assert found.count("x.py::f: 1 -> 2") == 1 and "x.py::f: 1 -> 2 #2" in found


def test_every_mutant_can_be_imported() -> None:
    path = next(iter(TARGETS))
    source = (ROOT / path).read_text()
    found = mutants(path, source)
    assert found
    for mutant in found:
        ast.parse(mutant.apply(source))


@pytest.mark.parametrize("path", TARGETS)
def test_module_has_tests(path: str) -> None:
    assert (ROOT / path).exists() and TARGETS[path]
    assert all((ROOT / f"tests/unit/{name}.py").exists() for name in TARGETS[path])
    assert module_of(path).split(".")[0] in ("envhub", "envhub_server", "envhub_client")


@pytest.mark.parametrize("mutant", NAMED, ids=lambda mutant: mutant.name)
def test_named_mutant_is_one_of_todays_code(mutant: Named) -> None:
    for path, before, after in mutant.edits:
        source = (ROOT / path).read_text()
        assert source.count(before) == 1 and before != after, (
            f"adapt tests/mutation/named.py: {path} has not {before!r}"
        )
        ast.parse(source.replace(before, after))
    assert (ROOT / "tests" / mutant.killed_by).exists()


def test_every_mutant_that_is_kept_has_a_reason() -> None:
    assert all(reason.endswith((".", ".py.")) and len(reason) > 20 for reason in kept().values())
    assert {name.partition("::")[0] for name in kept()} <= {*TARGETS}
