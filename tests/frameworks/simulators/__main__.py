"""Tries packages of simulators: ``python tests/frameworks/simulators [PACKAGE ...]`` prints a table.

Each package gets a virtual environment of its own in a temporary folder, and is installed there from the registry with
EnvHub, by uv where that is installed. Then its env is stepped by seeded actions alone, by a private hub, and over tcp
by a served one, each in a first and in a second session.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import page
from packages import PACKAGES, VARIABLES, Package

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
INSTALL_S, TRY_S = 1800, 900
COLUMNS = ("private", "private again", "tcp", "tcp again")


def python_of(version: str) -> str:
    """The Python of this version; the one that runs this script for none.

    Raises:
        RuntimeError: there is none on this machine.
    """
    if not version or version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    found = str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")
    if not found:
        raise RuntimeError(f"this machine has no Python {version}")
    return found


def install(package: Package, folder: Path) -> str:
    """Make the package's environment in this folder; returns why it cannot be made, or nothing."""
    marks = folder / "installed", folder / "refused"
    if marks[1].exists():
        return marks[1].read_text()
    if not marks[0].exists():
        shutil.rmtree(folder, ignore_errors=True)
        why = _installed(package, folder)
        folder.mkdir(exist_ok=True)
        (marks[1] if why else marks[0]).write_text(why)
        return why
    return ""


def _installed(package: Package, folder: Path) -> str:
    try:
        python, uv = python_of(package.python), "" if package.build else shutil.which("uv")  # which refuses gym 0.21
        made = [uv, "venv", "--quiet", "--python", python] if uv else [python, "-m", "venv"]
        subprocess.run([*made, folder], check=True)
        own = folder / "bin/python"
        pip = [uv, "pip", "install", "--quiet", "--python", own] if uv else [own, "-m", "pip", "install", "--quiet"]
        envhub = ["numpy", "msgpack"] if package.apart else ["-e", str(REPOSITORY)]
        wanted = [[*envhub, *package.requirements]]
        if package.build:
            wanted = [[*package.build], ["--no-build-isolation", "--no-deps", *package.requirements]]
        for each in wanted:
            done = subprocess.run([*pip, *each], capture_output=True, text=True, timeout=INSTALL_S)
            (folder / "install.txt").write_text(done.stderr)
            if done.returncode:
                lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
                return next((line for line in lines if "error:" in line.lower()), (lines or ["pip failed"])[-1])
    except (RuntimeError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def attempt(package: Package, folder: Path) -> dict[str, str]:
    """What the package's env did on each way."""
    environ = {**os.environ, **VARIABLES, "ENVHUB_TRIED": package.name}
    own = folder / "bin/python"
    program = [sys.executable if package.apart else own, HERE / "attempt.py", package.name, own]
    log = folder / "log.txt"
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                program, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=HERE, env=environ, timeout=TRY_S
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(COLUMNS, f"no end within {TRY_S} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return (
        json.loads(lines[-1]) if lines else dict.fromkeys(COLUMNS, f"ended with status {done.returncode}; see log.txt")
    )


def main() -> None:
    """Try the packages and print a table of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", help="names of packages; all without any")
    parser.add_argument("--folder", type=Path, help="keep the environments here, and use those that are here already")
    parser.add_argument("--install-only", action="store_true", help="only make the environments")
    parser.add_argument("--json", type=Path, help="append what was found to this file, a line for each package")
    parser.add_argument("--page", type=Path, help="write the page by what the file of --json says, and try nothing")
    told = parser.parse_args()
    if told.page:
        page.write(told.page, told.json)
        return
    chosen = [package for package in PACKAGES if not told.packages or package.name in told.packages]
    with tempfile.TemporaryDirectory(prefix="simulators-") as temporary:
        root = (told.folder or Path(temporary)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        print("| package | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 1), flush=True)
        for package in chosen:
            began_s, folder = time.monotonic(), root / package.name
            why = install(package, folder)
            found = dict.fromkeys(COLUMNS, "") if why or told.install_only else attempt(package, folder)
            cells = [f"cannot be installed: {why}", "", "", ""] if why else [found.get(name, "") for name in COLUMNS]
            print(f"| {package.name} | " + " | ".join(cells) + " |", flush=True)
            if told.json:
                record = {"package": package.name, "why": why, "s": round(time.monotonic() - began_s), **found}
                with told.json.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            if told.folder is None:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
