"""What the workers of a session import, they import once, unless a module does what no two workers may share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from hubs import lives, serve, wait_until

import envhub

CPUS = len(os.sched_getaffinity(0))
NUM_ENVS = CPUS + 4
CHILD_S = "86399.25"  # by which the process is known that a module starts
MODULE = """
import os, random, socket, subprocess, threading, time

with open({log!r}, "a") as file:
    file.write(f"{{open('/proc/self/comm').read().strip()}}\\n")

PRELOADS = open("/proc/self/comm").read().strip() == "envhub-preload"

{extra}

def name():
    return "imported"
"""
ENVS = """
import random
import gymnasium

class Env(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, late=False):
        if late:
            import {module}
        self.drawn = random.random()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {{}}

    def step(self, action):
        import {module}
        return 0, 0.0, False, False, {{"name": {module}.name()}}

def make():
    import {module}
    return Env()
"""
PRELOADED = ["envhub-worker"] * CPUS + ["envhub-preload"]
BY_THEMSELVES = PRELOADED + ["envhub-worker"] * (NUM_ENVS - CPUS)
EXTRAS = {
    "nothing": ("", PRELOADED),
    "a thread": ("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", BY_THEMSELVES),
    "a socket": ("opened = socket.socket()", BY_THEMSELVES),
    "a process": (f"started = subprocess.Popen(['sleep', '{CHILD_S}'])", BY_THEMSELVES),
    "an error": ("if PRELOADS: raise OSError('only once')", BY_THEMSELVES),
    "an end": ("if PRELOADS: os._exit(0)", BY_THEMSELVES),
    "a crash": ("if PRELOADS: os.kill(os.getpid(), 11)", BY_THEMSELVES),
}


def modules(folder: Path, monkeypatch: pytest.MonkeyPatch, extra: str) -> tuple[str, Path]:
    """Names of modules with and of envs that import another, and where that notes each import."""
    name, log = f"counted_{time.monotonic_ns()}", folder / "imports"
    (folder / f"{name}.py").write_text(MODULE.format(log=str(log), extra=extra))
    (folder / f"{name}_envs.py").write_text(ENVS.format(module=name))
    monkeypatch.syspath_prepend(str(folder))
    return f"{name}_envs", log


def children() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if CHILD_S in (process.info["cmdline"] or ())]


@pytest.mark.parametrize("what", EXTRAS)
def test_modules_are_imported_once_for_all_but_the_first_workers(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, importers = EXTRAS[what]
    name, log = modules(tmp_path, monkeypatch, extra)
    make = __import__(name).make
    log.unlink(missing_ok=True)
    with closing(envhub.make_vec([make] * NUM_ENVS, num_workers=NUM_ENVS)) as envs:
        envs.reset(seed=1)
        infos = envs.step(envs.action_space.sample())[-1]
        assert infos["name"].tolist() == ["imported"] * NUM_ENVS
        assert len(set(envs.get_attr("drawn"))) == NUM_ENVS, "workers draw the same numbers"
        assert sorted(log.read_text().split()) == sorted(importers)
    assert wait_until(lambda: not children())


PRINTS = """
import os, envhub
from {name} import make
if __name__ == "__main__":
    envhub.make_vec([make] * {num_envs}, num_workers={num_envs}).close()
"""


def test_what_a_module_prints_is_told_once_for_each_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, log = modules(tmp_path, monkeypatch, "print('a module was imported')")
    code = PRINTS.format(name=name, num_envs=NUM_ENVS)
    program = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60)
    assert program.stdout.count(b"a module was imported") == len(log.read_text().split()) == len(PRELOADED)


def test_hub_that_is_killed_while_modules_are_imported_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, log = modules(tmp_path, monkeypatch, "if PRELOADS: time.sleep(600)")
    with serve(tmp_path, f"odd={name}:make", cwd=tmp_path) as hub:
        code = f"import envhub; envhub.make_vec('odd', {NUM_ENVS}, hub={hub.ipc!r}, num_workers={NUM_ENVS})"
        client = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        try:
            assert wait_until(lambda: log.exists() and "envhub-preload" in log.read_text(), 30)
            below = psutil.Process(hub.process.pid).children(recursive=True)
            assert [process.name() for process in below].count("envhub-preload") == 2
            with closing(envhub.make_vec("odd", 1, hub=hub.ipc)) as envs:  # nobody else waits for it
                envs.reset()
            hub.process.kill()
            assert wait_until(lambda: not any(map(lives, below)))
        finally:
            client.kill()
            client.wait()


PROGRAM = """
import os, sys
from types import SimpleNamespace
from envhub_server import preload, surroundings
preload.PRELOAD_S = 1
preload.load = lambda build: None
names = SimpleNamespace(build=None, modules=["slow"])
preload.preloaded(names, 1, 2)
"""


def test_import_that_takes_too_long_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("while True: pass")
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, timeout=60)
    assert ended.returncode == -signal.SIGALRM
