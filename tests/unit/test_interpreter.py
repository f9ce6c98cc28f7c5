from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from envhub_server.ipc.packages import install, on_this_machine, package_of
from envhub_server.processes.interpreter import (
    ONE_THREAD,
    OWN,
    SAID_BYTES_MAX,
    InterpreterKey,
    InterpreterUnusable,
    Start,
    environment_of,
    find,
    not_executed,
    waits,
    what_is_wrong,
)

OF_THE_HUB = {"PATH": "/bin", "PYTHONPATH": "/ros", "PYTHONHOME": "/x", "VIRTUAL_ENV": "/v", "LD_LIBRARY_PATH": "/l"}


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def start(*lines: bytes) -> Start:
    found = Start()
    found.hear(b"".join(lines))
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
    found = what_is_wrong("/p", start(*lines), ending, output)
    assert found.startswith(f"/p{on_this_machine()}") and told in found and "\n" not in found


def test_hanging_interpreter_is_told_with_where_it_is() -> None:
    assert "hangs before its first line of Python" in waits("/p", Start())
    assert "(Python 3.8.18) hangs while it imports numpy" in waits("/p", start(V38, line(importing="numpy")))


def test_what_no_bootstrap_says_is_left_out() -> None:
    found = Start()
    found.hear(b"junk\n{}x\n\xff\n[1]\n" + line(unknown=1) + line(python=3) + V38[:5])
    assert found.python == "" and not found.last.ready
    found.hear(V38[5:] + line(ready=True))
    assert found.python == "3.8.18" and found.last.ready
    endless = Start()
    endless.hear(b"x" * SAID_BYTES_MAX)
    endless.hear(b"\n" + line(ready=True))
    assert not endless.last.ready


def test_missing_module_of_setuptools_is_installed_with_a_version_that_has_it() -> None:
    assert install("python", package_of("pkg_resources.extern")) == "python -m pip install 'setuptools<81'"
