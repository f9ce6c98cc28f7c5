"""Interpreters that cannot run an env: each is told at the hub and to the client in a line, and the hub goes on."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hubs import ServedHub, serve, wait_until
from interpreters import WORKING, add, environment

import envhub

AARCH64 = 183  # where these tests run, it is another processor
AT_MACHINE = 18  # in the header of an ELF file
TOLD_S = 30.0  # promised within 2 s; this machine may be slow, and what is told lasts


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def other_processor(path: Path) -> Path:
    program = bytearray(Path(sys.executable).resolve().read_bytes())
    struct.pack_into("<H", program, AT_MACHINE, AARCH64)
    path.write_bytes(program)
    path.chmod(0o755)
    return path


def old_pythons() -> dict[str, Path]:
    """Pythons before 3.8 that this machine has."""
    found = [*Path.home().glob(".pyenv/versions/*/bin/python"), *Path("/usr/bin").glob("python2.7")]
    versions = {path: re.search(r"(\d+)\.(\d+)", str(path)) for path in found}
    old = {path: tuple(map(int, version.groups())) for path, version in versions.items() if version}
    return {f"old-{number[0]}-{number[1]}": path for path, number in old.items() if number < (3, 8)}


def broken(folder: Path) -> dict[str, tuple[Path, str]]:
    """Of each broken interpreter its place, and what is told of it."""
    gone = environment(folder / "gone")
    (gone / "bin/python").unlink()
    (gone / "bin/python").symlink_to(folder / "no/python3.8")
    (folder / "text").write_text("hello")
    text = folder / "no-program"
    text.write_text("hello")
    text.chmod(0o755)
    sleepy = "import time\ntime.sleep(1000)"
    found = {
        "no-such-file": (folder / "nowhere/python", r"nowhere/python on \S+: no such file"),
        "not-executable": (folder / "text", "is not executable"),
        "no-program": (text, "is no program"),
        "other-processor": (other_processor(folder / "aarch64"), "is built for another processor"),
        "no-python": (Path("/bin/true"), "exited with status 0 and did not run as Python does"),
        "exits": (script(folder / "exits", "exit 3"), "exited with status 3 and did not run as Python"),
        "killed": (script(folder / "killed", "kill -SEGV $$"), "was ended by SIGSEGV"),
        "junk": (script(folder / "junk", "seq 20000", "echo junk"), "printed last: junk"),
        "apart": (script(folder / "apart", f'{sys.executable} "$@"', "exit 0"), "have the script `exec` it"),
        "hangs": (script(folder / "hangs", "sleep 1000"), "hangs before its first line of Python"),
        "base-gone": (gone, "which is gone: install that Python again, or make this virtual environment again"),
        "no-numpy": (environment(folder / "no-numpy"), "has no package 'numpy'; run: .*/no-numpy/bin/python -m pip"),
        "no-msgpack": (environment(folder / "no-msgpack", "numpy"), "pip install msgpack"),
        "no-gym": (environment(folder / "no-gym", "numpy", "msgpack"), r"no package 'gymnasium' \(or gym"),
        "broken-import": (
            environment(folder / "broken-import", "numpy", msgpack="import no_such_library"),
            r"cannot import 'msgpack': ModuleNotFoundError: .* 'no_such_library', in /\S+/msgpack.py; run: ",
        ),
        "hangs-in-import": (
            environment(folder / "hangs-in-import", "numpy", msgpack=sleepy),
            r"\(Python 3.*\) hangs while it imports msgpack",
        ),
    }
    for name, python in old_pythons().items():
        found[name] = (python, "(is Python 3|is too old).*needs (Python )?3.8 or later")
    return found


class BrokenHub:
    """A hub with an env of each broken interpreter, and some that can be made."""

    def __init__(self, hub: ServedHub, folder: Path, told: dict[str, str]) -> None:
        self.hub = hub
        self.folder = folder
        self.told = told


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokenHub]:
    folder = tmp_path_factory.mktemp("broken")
    interpreters = broken(folder)
    tables = [f'[envs.{name}]\nenv = "CartPole-v1"\npython = "{place}"\n' for name, (place, _) in interpreters.items()]
    tables += [
        '[envs.no-folder]\nenv = "CartPole-v1"\nfolder = "no-folder"\n',
        '[envs.no-package]\nenv = "no_such_simulator:make"\n',
        '[envs.well]\nenv = "CartPole-v1"\n',
        f'[envs.noisy]\nenv = "CartPole-v1"\npython = "{noisy(folder)}"\n',
    ]
    (folder / "hub.toml").write_text("\n".join(tables))
    told = {name: why for name, (_, why) in interpreters.items()}
    told["no-folder"] = r"the folder \S*no-folder on \S+, which its environment wants, does not exist"
    told["no-package"] = r"No module named 'no_such_simulator', in \S+ .* on \S+; install the package that has it"
    with serve(folder, "--config", str(folder / "hub.toml")) as hub:
        yield BrokenHub(hub, folder, told)


def noisy(folder: Path) -> Path:
    """An interpreter that prints before it runs Python, which does no harm."""
    return script(folder / "noisy", "seq 100", f'exec {sys.executable} "$@"')


@pytest.mark.long
def test_each_is_told_at_the_hub(served: BrokenHub) -> None:
    hub, told = served.hub, served.told
    assert wait_until(lambda: hub.log.count('"env_unready"') >= len(told)), hub.log
    lines = [line for line in hub.log.splitlines() if '"env_unready"' in line]
    for name, why in told.items():
        (line,) = [line for line in lines if f'"env": "{name}"' in line]
        assert re.search(why, line.replace(r"\"", '"')), (name, line)
    with envhub.connect(hub.ipc) as client:  # on a slow machine those that can be made start for longer
        assert wait_until(lambda: client.health()["unready"].keys() == told.keys()), client.health()
    health = [sys.executable, "-m", "envhub", "health", hub.ipc]
    said = subprocess.run(health, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0
    assert said.stdout.count("\nunready: ") == len(told) and "\nunready: no-numpy: " in said.stdout


@pytest.mark.long
def test_each_is_told_to_the_client_and_the_hub_goes_on(served: BrokenHub) -> None:
    hub = served.hub
    for name, why in served.told.items():
        kind = ModuleNotFoundError if name == "no-package" else envhub.RequestRefused
        with pytest.raises(kind, match=why) as caught:
            envhub.make_vec(name, 3, hub=hub.ipc)
        assert "\n" not in str(caught.value), name
    for name in ("well", "noisy"):
        envs = envhub.make_vec(name, 2, hub=hub.ipc)
        assert envs.reset(seed=1)[0].shape == (2, 4)
        envs.close()


def lines_of(log: str, event: str, why: str = "") -> list[str]:
    return [line for line in log.splitlines() if f'"{event}"' in line and why in line]


@pytest.mark.long
def test_interpreter_that_computes_without_end_is_told_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = environment(
        tmp_path / "venv", "numpy", msgpack="import os\nwhile not os.path.exists(os.environ['STOP']): 0"
    )
    (tmp_path / "hub.toml").write_text(
        f'[envs.busy]\nenv = "CartPole-v1"\npython = "{python}"\nvariables.STOP = "{tmp_path}/stop"\n'
    )
    told = rf"{python}/bin/python on \S+ \(Python 3\S+\) still starts: it imports msgpack"
    with serve(tmp_path, "--config", str(tmp_path / "hub.toml")) as hub, envhub.connect(hub.ipc) as client:
        # On a slow machine there are lines of what was before the import, too.
        assert wait_until(lambda: bool(lines_of(hub.log, "env_starting", "imports msgpack")), TOLD_S), hub.log
        (line,) = lines_of(hub.log, "env_starting", "imports msgpack")
        assert '"env": "busy"' in line and re.search(told, line)
        assert re.fullmatch(told, client.health()["unready"]["busy"])
        waits = rf"0/2 envs ready \({told}\)"

        def stop() -> None:
            wait_until(lambda: re.search(waits, caplog.text) is not None)
            (tmp_path / "stop").touch()

        stopping = threading.Thread(target=stop)
        with (
            caplog.at_level("INFO", "envhub"),
            pytest.raises(envhub.RequestRefused, match="has no package 'gymnasium'"),
        ):
            stopping.start()
            client.make_vec("busy", 2)
        stopping.join()
        assert re.search(waits, caplog.text)
        assert wait_until(lambda: "has no package 'gymnasium'" in client.health()["unready"].get("busy", ""))
        (line,) = lines_of(hub.log, "env_unready")
        assert "has no package 'gymnasium'" in line
        assert len(lines_of(hub.log, "env_starting", "imports msgpack")) == 1


@pytest.mark.long
def test_import_that_does_not_end_is_told_while_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "sleepy_sim.py").write_text("import time\ntime.sleep(1000)\n")
    (tmp_path / "dying_sim.py").write_text("import os\nos.abort()\n")
    (tmp_path / "hub.toml").write_text(
        '[envs.sleepy]\nenv = "sleepy_sim:make"\nfolder = "."\n[envs.dying]\nenv = "dying_sim:make"\n'
    )
    with serve(tmp_path, "--config", str(tmp_path / "hub.toml"), cwd=tmp_path) as hub:
        assert wait_until(lambda: bool(lines_of(hub.log, "env_starting", "a worker still imports sleepy_sim"))), hub.log
        with caplog.at_level("INFO", "envhub"), pytest.raises(envhub.EnvTimeout, match=r"sleepy_sim\.py"):
            envhub.make_vec("sleepy", 2, hub=hub.ipc, init_timeout=10)
        assert "0/2 envs ready (importing sleepy_sim)" in caplog.text
        assert wait_until(
            lambda: "the worker that imported 'dying_sim' was ended by SIGABRT before it was done" in hub.log
        )


@pytest.mark.long
def test_mended_interpreter_is_used_without_another_start_of_the_hub(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", *WORKING[:2])
    (tmp_path / "hub.toml").write_text(f'[envs.pole]\nenv = "CartPole-v1"\npython = "{python}"\n')
    with serve(tmp_path, "--config", str(tmp_path / "hub.toml")) as hub, envhub.connect(hub.ipc) as client:
        assert client.envs() == ["pole"]
        with pytest.raises(envhub.RequestRefused, match=r"'pole' is not ready: .*pip install gymnasium"):
            client.make_vec("pole", 2)
        assert "pip install gymnasium" in client.health()["unready"]["pole"]
        (packages,) = python.glob("lib/python*/site-packages")
        for module in WORKING[2:]:
            add(packages, module)
        envs = client.make_vec("pole", 2)
        assert envs.reset(seed=1)[0].shape == (2, 4)
        envs.close()
        assert wait_until(lambda: not client.health()["unready"])
        assert "env_ready" in hub.log
