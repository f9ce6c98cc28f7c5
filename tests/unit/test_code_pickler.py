"""Functions and classes pickled by value keep the names of the files that they were written in."""

from __future__ import annotations

import pickle
import types
from collections.abc import Iterator
from typing import Any

from envhub.values import code_pickler

SOURCE = """
class Arm:
    def step(self):
        def inner():
            return 1
        return inner

make = lambda: Arm()
"""


def written_in(file: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, file, "exec"), names)  # noqa: S102
    return names


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from codes_of(part)


def test_function_its_class_and_what_is_nested_in_them_keep_their_file() -> None:
    make = pickle.loads(code_pickler.dumps(written_in("sims/arm.py")["make"]))
    arm = make()
    codes = [*codes_of(make.__code__), *codes_of(type(arm).step.__code__)]
    assert [code.co_name for code in codes] == ["<lambda>", "step", "inner"]
    assert {code.co_filename for code in codes} == {"sims/arm.py"}
    assert arm.step()() == 1


def test_functions_of_two_files_keep_each_its_own() -> None:
    made = pickle.loads(code_pickler.dumps([written_in(file)["make"] for file in ("a.py", "<stdin>")]))
    assert [make.__code__.co_filename for make in made] == ["a.py", "<stdin>"]
