"""Modules that another process finds by their names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from envhub.values.pickling import is_importable


def test_module_without_a_file_is_found_by_its_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_importable("sys")
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    assert not is_importable("made_by_hand")


def test_finder_that_raises_hides_no_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken:
        def find_spec(self, *args: object) -> None:
            raise RuntimeError("no network")

    (tmp_path / "behind_a_finder.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("behind_a_finder")
    monkeypatch.setattr(sys, "meta_path", [Broken(), object(), *sys.meta_path])
    assert is_importable("behind_a_finder")


def test_part_of_a_package_that_is_not_there_is_found_by_no_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = ModuleType("made_by_hand.part")
    part.__file__ = str(tmp_path / "part.py")
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    monkeypatch.setitem(sys.modules, "made_by_hand.part", part)
    assert not is_importable("made_by_hand.part")
