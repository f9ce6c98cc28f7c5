"""The pages' words are true: commands are on lines of their own, programs run, the names of a step's hops exist."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from envhub_client.connection import known_hubs
from hubs import ServedHub, free_port
from interpreters import python_of
from pages import MANUAL, ROOT, blocks, section

README = ROOT / "README.md"
OLD_SIMULATOR = ROOT / "server/docs/simulators.md"
ARCHITECTURE = ROOT / "envhub/docs/architecture.md"
PROGRAMS = blocks("python", MANUAL)
PRINTED = dict(
    pair
    for page in MANUAL
    for pair in re.findall(r"^```python\n(.*?)^```\n\nIt prints:\n\n```\n(.*?)^```$", page.read_text(), re.M | re.S)
)
HOMES = {
    "HubVectorEnv": "envhub_client.envs.vector_env",
    "WireLane": "envhub_client.lanes.wire",
    "SharedLane": "envhub_client.lanes.shared",
    "Connection": "envhub_client.connection.connection",
    "ClientProtocol": "envhub.protocol.client",
    "HubProtocol": "envhub.protocol.hub",
    "Session": "envhub_client.session.session",
    "SessionMachine": "envhub_server.session.machine",
    "SessionRuntime": "envhub_server.hub.runtime",
    "Arena": "envhub.arena.memory",
    "ArenaDriver": "envhub.arena.memory",
    "Gateway": "envhub_server.hub.gateway",
    "Row": "envhub_server.worker.row",
    "Stepper": "envhub_server.worker.stepper",
}


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_run(number: int, hub: ServedHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    known_hubs.keep("simbox", hub.tcp)
    program = PROGRAMS[number].replace("tcp://127.0.0.1:5555", hub.tcp)
    here = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, **here)
    assert ran.returncode == 0, ran.stderr
    assert "Error" not in ran.stderr
    if (printed := PRINTED.get(PROGRAMS[number])) is not None:
        lines = zip(ran.stdout.splitlines(), printed.splitlines(), strict=True)
        assert all(line.startswith(wanted.removesuffix("…")) for line, wanted in lines), ran.stdout


@pytest.mark.long
def test_commands_of_a_hub_on_another_machine(tmp_path: Path) -> None:
    remote = section(README, "A hub on another machine")
    add, serve, login, program = (
        line for block in re.findall(r"```(?:sh|python)\n(.*?)```", remote, re.DOTALL) for line in split(block)
    )
    place = f"127.0.0.1:{free_port()}"
    environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}

    def command(line: str) -> list[str]:
        line = line.replace("simbox:5555", place).replace("0.0.0.0:5555", place).replace("~", str(tmp_path))
        return [sys.executable, "-m", *line.split()]

    def run(arguments: list[str], given: str = "") -> str:
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environ, input=given)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    key = run(command(add))
    with subprocess.Popen(command(serve), stdout=subprocess.PIPE, env=environ, stderr=subprocess.DEVNULL) as hub:
        assert hub.stdout is not None and hub.stdout.readline()
        assert "the hub answers" in run(command(login), key)
        run([sys.executable, "-c", program.replace('"simbox"', '"127.0.0.1"')])
        hub.terminate()


@pytest.mark.long
def test_simulator_with_another_python(tmp_path: Path) -> None:
    python = python_of("3.8")
    if python is None:
        pytest.skip("this machine has no Python 3.8")
    prepare, start = blocks("sh", [OLD_SIMULATOR])
    simulator, trainer = blocks("python old", [OLD_SIMULATOR])
    (tmp_path / "old_sim.py").write_text(simulator)
    place = f"127.0.0.1:{free_port()}"
    environ = {**os.environ, "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    own = f"{sys.executable} -m envhub"

    def shell(line: str) -> str:
        line = line.replace("python3.8", str(python)).replace("envhub serve", f"exec {own} serve")
        return line.replace("127.0.0.1:5555", place)

    for line in prepare.splitlines():
        ran = subprocess.run(["sh", "-c", shell(line)], capture_output=True, text=True, timeout=100, env=environ)
        assert ran.returncode == 0, ran.stderr
    arguments = {"cwd": tmp_path, "env": environ, "text": True, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["sh", "-c", shell(start)], stdout=subprocess.PIPE, **arguments) as hub:
        assert hub.stdout is not None and hub.stdout.readline().startswith("listening")
        program = [sys.executable, "-c", shell(trainer)]
        ran = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        listed = subprocess.run([*own.split(), "envs", f"tcp://{place}"], capture_output=True, text=True, timeout=60)
        hub.terminate()
        printed = hub.stdout.read()
    assert ran.stdout == "(4, 3)\n", ran.stderr
    assert printed.count("made in Python 3.8") >= 4 and listed.stdout.startswith("old\tBox(")


def split(block: str) -> list[str]:
    """The commands of a block of sh, or a program as it is."""
    return [block] if "import" in block else block.splitlines()


def test_hops_of_a_step_are_at_most_ten_and_name_what_exists() -> None:
    assert 5 <= len(re.findall(r"^\d+\. ", section(ARCHITECTURE, "The wire lane"), re.MULTILINE)) <= 10
    names = re.findall(r"`([A-Z]\w+)\.(\w+)`", section(ARCHITECTURE, "A step, hop by hop"))
    assert len(names) >= 10
    for owner, member in names:
        assert hasattr(home(owner), member), f"{owner}.{member}"


def test_pictures_name_classes_that_exist() -> None:
    pictures = "".join(blocks("", [README, ARCHITECTURE]))
    names = {*re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", pictures)} | {"Row", "Session"}
    assert {"HubVectorEnv", "WireLane", "SharedLane", "SessionMachine", "HubProtocol"} <= names
    for name in names:
        assert isinstance(home(name), type), name


def home(name: str) -> Any:
    """The class of this name."""
    return getattr(importlib.import_module(HOMES[name]), name)
