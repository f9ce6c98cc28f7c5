"""Each mutant in a process of its own, forked from one that has imported what is no mutant's: pytest, numpy, zmq."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from mutation.mutator import Mutant, mutants
from mutation.targets import TARGETS

ROOT = Path(__file__).parents[2]
PACKAGES = ("server/", "client/", "")  # a module's path begins with one of these
POLL_S = 0.01
TIMEOUT_S, TIMEOUT_FACTOR = 15.0, 6.0  # a mutant whose tests take so much longer than without it is killed by that
_OPTIONS = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", "-p", "no:faulthandler"]
_SELECTED = ["-o", "addopts=", "-m", "not chaos and not benchmark and not long", "--hypothesis-seed=0"]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: killed, if a test failed or did not end."""

    name: str
    killed: bool
    seconds: float


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed source."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        self._module = module
        self._path = path
        self._code: CodeType = compile(source, str(path), "exec", dont_inherit=True)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)  # noqa: S102

    def get_source(self, fullname: str) -> str:
        return self._path.read_text()


class _Hypothesis:
    """Examples follow from the mutant alone, and none is made smaller: that it fails is enough."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: Any) -> None:
        from hypothesis import HealthCheck, Phase, settings

        phases = (Phase.explicit, Phase.generate)
        quick = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": [*HealthCheck]}
        settings.register_profile("mutation", phases=phases, **quick)  # type: ignore[arg-type]
        settings.load_profile("mutation")


class _Quickest:
    """The quickest tests come first, as they were when the module's tests ran without a mutant, into this file."""

    def __init__(self, seconds: Path) -> None:
        self._path = seconds
        self._known: dict[str, float] = json.loads(seconds.read_text()) if seconds.exists() else {}
        self._seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._known.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if not self._known:
            self._path.write_text(json.dumps(self._seconds))


def module_of(path: str) -> str:
    """The module in this file."""
    prefix = next(each for each in PACKAGES if path.startswith(each))
    return path.removeprefix(prefix).removesuffix(".py").replace("/", ".")


def preload() -> None:
    """Import what tests import and no mutant is in."""
    import cloudpickle  # noqa: F401
    import gymnasium  # noqa: F401
    import hypothesis.stateful  # noqa: F401
    import msgpack  # noqa: F401
    import numpy  # noqa: F401
    import psutil  # noqa: F401
    import zmq.utils.monitor  # noqa: F401
    import zstandard  # noqa: F401

    loaded = [name for name in sys.modules if name.split(".")[0] in ("envhub", "envhub_server", "envhub_client")]
    assert not loaded, f"imported before they can be mutated: {loaded}"


def passes(path: str, source: str, timeout_s: float, seconds: Path, output: Path | None = None) -> bool:
    """True if the module's tests pass with this source; not if they do not end in time.

    Their ``seconds`` are written to this file, or, where it exists, say in which order they run.
    """
    files = [str(ROOT / f"tests/unit/{name}.py") for name in TARGETS[path]]
    child = os.fork()
    if child == 0:
        code = 99
        with contextlib.suppress(BaseException):
            os.setsid()
            target = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(target, 1), os.dup2(target, 2)
            os.chdir(ROOT)
            sys.meta_path.insert(0, _Mutated(module_of(path), ROOT / path, source))
            code = int(pytest.main([*_OPTIONS, *_SELECTED, *files], plugins=[_Hypothesis(), _Quickest(seconds)]))
        os._exit(code)
    return _ended(child, time.monotonic() + timeout_s) == 0


def _ended(child: int, until_s: float) -> int:
    """How the process ended, which is killed with all that it started if that takes too long."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > until_s:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what its tests may have left
    return os.waitstatus_to_exitcode(status)


def chosen(path: str, sample: int, seed: int) -> list[Mutant]:
    """The mutants of a module; if there are more than ``sample``, so many of them, drawn from the seed."""
    found = mutants(path, (ROOT / path).read_text())
    if not sample or len(found) <= sample:
        return found
    drawn = set(random.Random(seed).sample(range(len(found)), sample))
    return [mutant for number, mutant in enumerate(found) if number in drawn]


def run(path: str, wanted: Sequence[Mutant], jobs: int, until_s: float) -> Iterator[Verdict]:
    """What becomes of these mutants of a module; after ``until_s``, on the monotonic clock, no more are begun.

    Raises:
        RuntimeError: the module's tests fail without a mutant.
    """
    source = (ROOT / path).read_text()
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        seconds = Path(folder, "seconds.json")
        if not passes(path, source, 600.0, seconds):
            raise RuntimeError(f"the tests of {path} fail without a mutant: {TARGETS[path]}")
        limit_s = max(TIMEOUT_S, TIMEOUT_FACTOR * (time.monotonic() - begun_s))

        def judge(mutant: Mutant) -> Verdict | None:
            now_s = time.monotonic()
            if now_s > until_s:
                return None
            alive = passes(path, mutant.apply(source), limit_s, seconds)
            return Verdict(mutant.name, not alive, time.monotonic() - now_s)

        for verdict in pool.map(judge, wanted):
            if verdict is not None:
                yield verdict


def kept() -> dict[str, str]:
    """Mutants that are noticed by no unit test and need not be, each with the reason, from ``kept.txt``."""
    lines = (Path(__file__).parent / "kept.txt").read_text().splitlines()
    return {name: reason.strip() for name, reason in zip(lines[::2], lines[1::2], strict=True)}


class Results:
    """What became of mutants so far, in a file with a line for each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.verdicts: dict[str, Verdict] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                verdict = Verdict(**json.loads(line))
                self.verdicts[verdict.name] = verdict

    def add(self, verdict: Verdict) -> None:
        """Keep it, also for the next run."""
        self.verdicts[verdict.name] = verdict
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(vars(verdict)) + "\n")
