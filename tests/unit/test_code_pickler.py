"""Functions and classes pickled by value keep the names of the files that they were written in."""

from __future__ import annotations

import importlib
import pickle
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envhub.values import pickling
from envhub.values.pickling import is_importable

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
    make = pickle.loads(pickling.dumps(written_in("sims/arm.py")["make"]))
    arm = make()
    codes = [*codes_of(make.__code__), *codes_of(type(arm).step.__code__)]
    assert [code.co_name for code in codes] == ["<lambda>", "step", "inner"]
    assert {code.co_filename for code in codes} == {"sims/arm.py"}
    assert arm.step()() == 1


def test_functions_of_two_files_keep_each_its_own() -> None:
    made = pickle.loads(pickling.dumps([written_in(file)["make"] for file in ("a.py", "<stdin>")]))
    assert [make.__code__.co_filename for make in made] == ["a.py", "<stdin>"]


def test_module_of_a_folder_that_cannot_be_read_any_more_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "envhub_once_there"
    package.mkdir()
    for name in ("__init__.py", "part.py"):
        (package / name).write_text("def act(): return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("envhub_once_there.part")
    shutil.rmtree(package)  # as of a program that has changed its user
    importlib.invalidate_caches()
    for module in ("envhub_once_there", "envhub_once_there.part"):
        assert is_importable(module)
    for module in ("envhub_once_there.part", "envhub_once_there"):
        del sys.modules[module]


def test_module_that_no_import_finds_goes_by_value_and_is_registered_no_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = types.ModuleType("made_by_hand")
    exec(SOURCE, vars(module))  # noqa: S102
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    pickled = pickling.dumps(module.make)
    monkeypatch.delitem(sys.modules, "made_by_hand")
    assert pickle.loads(pickled)().step()() == 1
    assert "made_by_hand" not in pickling.cloudpickle.list_registry_pickle_by_value()


def test_module_under_another_name_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("envhub_first_name")
    exec("def act(): return 4", vars(module))  # noqa: S102
    module.act.__module__ = "envhub_second_name"
    monkeypatch.setitem(sys.modules, "envhub_second_name", module)
    assert b"envhub_second_name" in pickling.dumps(module.act)
