"""Other interpreters for the tests: virtual environments of the Pythons of this machine, each with a gym or Gymnasium.

They are made once, with pip, in a folder of pytest's cache, or in the one that ``ENVHUB_TEST_INTERPRETERS`` names.
``python tests/support/interpreters.py FOLDER`` makes beforehand those that `nox -s long` needs.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PYTHONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")
GYMS = ("gym==0.21.0", "gym==0.26.2", "gymnasium==0.29.1", "gymnasium==1.0.0", "gymnasium==1.4.0")
# The newest NumPy with which those gyms work, by Python; and the last setuptools that builds gym 0.21.
NUMPY = {"3.12": "numpy<2", "3.13": "numpy"}
NUMPY_BEFORE = "numpy<1.24"
BUILD = ("setuptools==66.1.1", "wheel<0.40")
ENVIRONMENT_VARIABLE = "ENVHUB_TEST_INTERPRETERS"


@dataclass(frozen=True)
class Combination:
    """A Python with a gym."""

    python: str
    gym: str

    @property
    def name(self) -> str:
        return f"{self.python}-{self.gym.replace('==', '')}"

    @property
    def version(self) -> tuple[str, tuple[int, ...]]:
        package, _, version = self.gym.partition("==")
        return package, tuple(map(int, version.split(".")[:2]))


# What does not install, or cannot be imported or make an env: Gymnasium 1.4 before Python 3.10, gym 0.21 from 3.12 on
# (it asks for entry points as that Python no longer gives them), gym 0.26 on 3.13 (with a NumPy that has no ``bool8``).
WITHOUT = {
    *((python, "gymnasium==1.4.0") for python in ("3.8", "3.9")),
    *((python, "gym==0.21.0") for python in ("3.12", "3.13")),
    ("3.13", "gym==0.26.2"),
}
MATRIX = [Combination(python, gym) for python in PYTHONS for gym in GYMS if (python, gym) not in WITHOUT]
FEW = [
    Combination("3.8", "gym==0.21.0"),
    Combination("3.9", "gym==0.26.2"),
    Combination("3.10", "gymnasium==0.29.1"),
    Combination("3.13", "gymnasium==1.0.0"),
]


def python_of(version: str) -> Path | None:
    """A Python of this version on this machine, by the PATH or of pyenv."""
    candidates = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        if not subprocess.run([str(candidate), "-c", ""], capture_output=True).returncode:
            return Path(candidate)
    return None


def interpreter(config: pytest.Config, combination: Combination) -> Path:
    """The virtual environment of this combination, made if it is not there yet; skips where there is no such Python."""
    import pytest

    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    assert config.cache is not None
    found = made(Path(chosen) if chosen else Path(config.cache.mkdir("interpreters")), combination)
    return found or pytest.skip(f"this machine has no Python {combination.python}")


def made(root: Path, combination: Combination) -> Path | None:
    """The virtual environment of this combination in this folder; None where there is no such Python."""
    root.mkdir(parents=True, exist_ok=True)
    folder, complete = root / combination.name, root / f"{combination.name}.complete"
    with (root / f"{combination.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if complete.exists():
            return folder
        python = python_of(combination.python)
        if python is None:
            return None
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "venv", folder)
        pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, *BUILD, NUMPY.get(combination.python, NUMPY_BEFORE), "msgpack")
        run(*pip, "--no-build-isolation", combination.gym)
        complete.touch()
    return folder


def run(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"


WORKING = ("numpy", "msgpack", "gymnasium", "cloudpickle", "farama_notifications", "typing_extensions")


def environment(folder: Path, *modules: str, **files: str) -> Path:
    """A virtual environment of this Python with these packages of this one, and these modules."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for module in modules:
        add(packages, module)
    for name, text in files.items():
        (packages / f"{name}.py").write_text(text)
    return folder


def add(packages: Path, module: str) -> None:
    """Have these site-packages contain a module of this Python, too."""
    found = Path(str(importlib.import_module(module).__file__))
    whole = found.parent if found.name == "__init__.py" else found
    for place in (whole, whole.parent / f"{module}.libs"):
        if place.exists():
            (packages / place.name).symlink_to(place)


if __name__ == "__main__":
    for each in FEW:
        made(Path(sys.argv[1]), each)
