"""A copy of the repository with a mutant in it, in which tests run as they do here, with all processes they start."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutation.named import Named

ROOT = Path(__file__).parents[2]
_COPIED = ("envhub", "server", "client", "tests", "pyproject.toml")
TIMEOUT_S = 600.0


@contextlib.contextmanager
def copied(mutant: Named | None = None) -> Iterator[Path]:
    """A folder with the repository's code and tests, and this mutant in it."""
    with tempfile.TemporaryDirectory(prefix="envhub-mutant-") as name:
        folder = Path(name)
        for part in _COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / part, folder / part)
        for path, before, after in mutant.edits if mutant is not None else ():
            text = (folder / path).read_text()
            assert text.count(before) == 1, f"{mutant.name if mutant else ''}: {path} has not once: {before}"
            (folder / path).write_text(text.replace(before, after))
        yield folder


def environ(folder: Path) -> dict[str, str]:
    """The variables with which Python imports what is in this folder."""
    places = os.pathsep.join(str(folder / part) for part in ("", "server", "client"))
    return {**os.environ, "PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"}


def tested(folder: Path, tests: Sequence[str], marker: str = "") -> bool:
    """True if these tests, below ``tests``, pass in this folder."""
    selected = marker or "not chaos and not benchmark and not long"
    run = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", selected, "-p", "no:cacheprovider"]
    run += [str(folder / "tests" / name) for name in tests]
    try:
        found = subprocess.run(
            run, cwd=folder, env=environ(folder), timeout=TIMEOUT_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    if found.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {found.returncode}:\n{found.stdout[-4000:]}{found.stderr[-2000:]}")
    return found.returncode == 0
