from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from envhub_client.private_hub.program_environment import interpreter_flags, start_flags
from envhub_server.ipc.packages import install, on_this_machine, package_of
from envhub_server.processes.interpreter import (
    ONE_THREAD,
    OWN,
    START_BYTES_MAX,
    InterpreterKey,
    InterpreterUnusable,
    Start,
    environment_of,
    find,
    not_executed,
)
from envhub_server.worker import name_lister

OF_THE_HUB = {"PATH": "/bin", "PYTHONPATH": "/ros", "PYTHONHOME": "/x", "VIRTUAL_ENV": "/v", "LD_LIBRARY_PATH": "/l"}


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def start(*lines: bytes) -> Start:
    found = Start("/p")
    found.feed(b"".join(lines))
    return found


def test_what_is_about_the_hubs_python_reaches_no_other_interpreter() -> None:
    assert environment_of(OWN, sys.executable, OF_THE_HUB) == {**OF_THE_HUB, **ONE_THREAD}
    assert environment_of(OWN, sys.executable, {"OMP_NUM_THREADS": "3"}) == {**ONE_THREAD, "OMP_NUM_THREADS": "3"}
    # An empty part of it is the working directory to Python, and easily left by PYTHONPATH=$PYTHONPATH:/more.
    assert environment_of(OWN, sys.executable, {"PYTHONPATH": "/a::/b:"})["PYTHONPATH"] == "/a:/b"
    other = InterpreterKey("/old/bin/python", (("PYTHONPATH", "/mine"), ("A", "b")), ("/a", "/b"))
    assert environment_of(other, "/old/bin/python", OF_THE_HUB) == {
        "PATH": "/old/bin:/bin",
        "LD_LIBRARY_PATH": "/a:/b",
        "PYTHONPATH": "/mine",
        "A": "b",
        **ONE_THREAD,
    }
    plain = InterpreterKey("/old/bin/python")
    assert environment_of(plain, "/old/bin/python", OF_THE_HUB)["LD_LIBRARY_PATH"] == "/l"
    assert not plain.__eq__(other) and plain.is_other and not OWN.is_other
    assert not InterpreterKey(sys.executable, (("A", "b"),)).is_other


@pytest.mark.parametrize(("mark", "variable"), [("pyvenv.cfg", "VIRTUAL_ENV"), ("conda-meta", "CONDA_PREFIX")])
def test_folder_with_an_interpreter_is_taken_for_it(tmp_path: Path, mark: str, variable: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    (tmp_path / mark).touch()
    program = find(str(tmp_path))
    assert program == str(tmp_path / "bin/python") == find(program)
    assert environment_of(InterpreterKey(str(tmp_path)), program, {})[variable] == str(tmp_path)


def test_command_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python3.8x").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find("python3.8x") == str(tmp_path / "python3.8x") and find("") == sys.executable
    with pytest.raises(InterpreterUnusable, match=r"python9x on .*: no such file, and no such command on the PATH"):
        find("python9x")


def test_program_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(tmp_path / "gone/python3.8")
    for python, why in {
        "nowhere": "nowhere on .*: no such file",
        "text": "text on .* is not executable",
        "bin": "bin on .* is a folder without bin/python",
        "": r"bin/python3 on .* leads to .*gone/python3.8, which is gone: .*make this virtual environment again",
    }.items():
        with pytest.raises(InterpreterUnusable, match=why):
            find(str(tmp_path / python))


def test_why_the_kernel_does_not_execute_a_program(tmp_path: Path) -> None:
    (tmp_path / "elf").write_bytes(b"\x7fELF...")
    (tmp_path / "text").write_text("hello")
    told = {
        (name, number): not_executed(str(tmp_path / name), OSError(number, os.strerror(number)))
        for name, number in [("elf", errno.ENOEXEC), ("text", errno.ENOEXEC), ("text", errno.ENOENT)]
    }
    assert "is built for another processor" in told["elf", errno.ENOEXEC]
    assert "is no program" in told["text", errno.ENOEXEC]
    assert "the interpreter in its first line, or its loader, is missing" in told["text", errno.ENOENT]


V38 = line(python="3.8.18")


@pytest.mark.parametrize(
    ("lines", "ending", "output", "told"),
    [
        ([line(python="3.7.1"), line(problem="old")], "", "", "is Python 3.7.1, and EnvHub needs 3.8 or later"),
        ([], "exited with status 1", "SyntaxError: invalid syntax\n\n", "is too old: EnvHub needs Python 3.8"),
        (
            [V38, line(importing="msgpack"), line(problem="missing", module="msgpack")],
            "",
            "",
            "(Python 3.8.18) has no package 'msgpack'; run: /p -m pip install msgpack",
        ),
        ([V38, line(problem="missing", module="gymnasium")], "", "", "'gymnasium' (or gym, 0.21 or later); run:"),
        (
            [V38, line(problem="broken", module="numpy", why="ImportError: x\n y")],
            "",
            "",
            "cannot import 'numpy': ImportError: x y; run: /p -m pip install --force-reinstall numpy",
        ),
        ([line(problem="apart")], "", "", "starts Python as another process"),
        ([], "exited with status 3", "", "exited with status 3 and did not run as Python does; name an interpreter"),
        ([], "exited with status 0", "a\nb\n", "did not run as Python does, and printed last: b; name"),
        (
            [],
            "exited with status 1",
            "Fatal Python error: no encodings\n<no Python frame>\n",
            "last: Fatal Python error",
        ),
        (
            [V38, line(importing="numpy")],
            "was ended by SIGSEGV",
            "",
            "(Python 3.8.18) was ended by SIGSEGV while it imports numpy",
        ),
    ],
)
def test_what_is_wrong_is_one_line(lines: list[bytes], ending: str, output: str, told: str) -> None:
    found = start(*lines).what_is_wrong(ending, output)
    assert found.startswith(f"/p{on_this_machine()}") and told in found and "\n" not in found


def test_hanging_interpreter_is_told_with_where_it_is() -> None:
    assert "hangs before its first line of Python" in Start("/p").why_ended
    assert "(Python 3.8.18) hangs while it imports numpy" in start(V38, line(importing="numpy")).why_ended


def test_what_no_bootstrap_says_is_left_out() -> None:
    found = Start("/p")
    found.feed(b"junk\n{}x\n\xff\n[1]\n" + line(unknown=1) + line(python=3) + V38[:5])
    assert found.python == "" and not found.last.ready
    found.feed(V38[5:] + line(ready=True))
    assert found.python == "3.8.18" and found.last.ready
    endless = Start("/p")
    endless.feed(b"x" * START_BYTES_MAX)
    endless.feed(b"\n" + line(ready=True))
    assert not endless.last.ready


def test_missing_module_of_setuptools_is_installed_with_a_version_that_has_it() -> None:
    assert install("python", package_of("pkg_resources.extern")) == "python -m pip install 'setuptools<81'"


class Flags:
    """What ``sys.flags`` has of ``-S -v -i -q``."""

    isolated = ignore_environment = no_user_site = safe_path = optimize = bytes_warning = dont_write_bytecode = 0
    no_site = verbose = inspect = interactive = quiet = 1


def test_options_that_would_break_a_worker_are_left_out() -> None:
    assert interpreter_flags(Flags(), [], {}) == start_flags(Flags()) == []


# --- frames without a screen ------------------------------------------------------------------------------------------


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
