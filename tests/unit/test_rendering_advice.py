"""What is said where a library that draws without a screen is missing or has no device."""

from __future__ import annotations

from typing import Any

import pytest
from envhub_server.worker import name_lister


def test_missing_library_comes_with_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lister, "_library", lambda name, file: None)
    assert (
        name_lister.why_not("egl") == "there is no libEGL: apt-get install libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri"
    )
    assert name_lister.why_not("osmesa") == "there is no libOSMesa: apt-get install libosmesa6"


def test_egl_without_a_library_to_draw_with_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lister, "_library", lambda name, file: object() if name == "EGL" else None)
    assert name_lister.why_not("egl").endswith("apt-get install libgl1")


def test_missing_pyopengl_is_told_where_mujoco_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        return None if name == "OpenGL" else object()

    monkeypatch.setattr(name_lister, "find_spec", find)
    assert name_lister.why_not("egl").endswith("pip install PyOpenGL")


def test_device_that_this_user_may_not_open_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lister.glob, "glob", lambda pattern: ["/dev/dri/renderD129", "/dev/dri/renderD128"])
    monkeypatch.setattr(name_lister.os, "access", lambda path, mode: path.endswith("9"))
    assert name_lister._permissions().startswith("this user may not open /dev/dri/renderD128: add it to the group")
    monkeypatch.setattr(name_lister.os, "access", lambda path, mode: True)
    assert name_lister._permissions() == ""
