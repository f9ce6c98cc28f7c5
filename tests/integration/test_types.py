"""What mypy and pyright say of a user's program: nothing of a right one, and each mistake of a wrong one.

The code of all pages is right, and so is each name in their texts.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import PAGES

pytestmark = pytest.mark.long  # the checkers read all that the program imports

RIGHT = """
from typing import Any

import gymnasium as gym
import numpy as np
from typing_extensions import Unpack

import envhub


def train(steps: int, **options: Unpack[envhub.MakeKeywords]) -> float:
    envs = envhub.make_vec("CartPole-v1", num_envs=4, autoreset_mode="SameStep", **options)
    total = 0.0
    observations, infos = envs.reset(seed=1)
    for _ in range(steps):
        observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        total += float(np.sum(rewards))
    envs.close()
    return total


def one() -> envhub.HubEnv:
    return envhub.make("CartPole-v1", on_crash="raise", render_mode="rgb_array")


def asked() -> list[str]:
    with envhub.connect("tcp://127.0.0.1:5555", timeout=3) as client:
        envs: envhub.HubVectorEnv = client.make_vec("CartPole-v1", 2, num_workers="auto", lane="wire")
        sizing: envhub.Sizing = envs.sizing
        print(sizing, envs.call("render"))
        return client.envs()


class Watching(envhub.StepObserver):
    def step_ended(self, envs: envhub.HubVectorEnv, result: tuple[Any, ...]) -> None:
        print(envs.sizing, result)


try:
    print(train(10, hub="tcp://127.0.0.1:5555", copy=False, step_timeout=10, gpus=[0]), one(), asked())
except (envhub.errors.HubLost, envhub.EnvTimeout) as error:
    print(error)
upstream = envhub.AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, on_timeout="raise")
"""
MISTAKES = {
    'envhub.make_vec("CartPole-v1", 4, step_timout=10)': "step_timout",
    'envhub.make_vec("CartPole-v1", 4, on_crash="retry")': "on_crash",
    'envhub.make_vec("CartPole-v1", "4")': "int",
    'envhub.make("CartPole-v1", lane="tcp")': "lane",
    "envhub.this_does_not_exist()": "this_does_not_exist",
    'envhub.AsyncVectorEnv([], gpus="0 1")': "gpus",
    'envhub.connect().make_vec("CartPole-v1", hub="tcp://127.0.0.1:5556")': "hub",
    "envhub.HubVectorEnv.step(None, 1).rewards": "rewards",
}

# What an editor shows where the pointer is.
SHOWN = {
    "envhub.make_vec": ("num_envs", "record", "HubVectorEnv"),
    "envhub.make_vec('CartPole-v1')": ("HubVectorEnv",),
    "envhub.make_vec('CartPole-v1').step(0)[1]": ("ndarray",),
    "envhub.make('CartPole-v1')": ("HubEnv",),
    "envhub.connect": ("timeout", "Client"),
}


# What ``envs`` is in the text of a page, where it is no ``envhub.HubVectorEnv``.
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"`((?:envhub|envs)(?:\.[a-zA-Z_]\w*)+)")
# Frameworks are not installed where this runs.
MISSING = re.compile(r'(?:module named|analyzing|Import) "(?!envhub)|Class cannot subclass')


def programs() -> dict[str, str]:
    """Each program by the name of its file: those above, and of each page its blocks and the names in its text."""
    found = {"right": RIGHT, "wrong": "\n".join(["import envhub", *MISTAKES])}
    found["shown"] = "\n".join(["import envhub", *(f"reveal_type({each})" for each in SHOWN)])
    for number, page in enumerate(PAGES):
        text, name = page.read_text(), f"page_{number}_{page.stem}"
        python = [block for kind, block in BLOCK.findall(text) if kind == "python"]
        found.update({f"{name}_{place}": block for place, block in enumerate(python)})
        if "client" in page.parts and (names := dict.fromkeys(NAME.findall(BLOCK.sub("", text)))):
            prints = (f"    print({each})" for each in names)
            lines = ["import envhub", "def names(envs: envhub.HubVectorEnv) -> None:", *prints]
            found[name] = "\n".join(lines)
    return found


def by_mypy(folder: Path) -> list[tuple[str, int, str]]:
    """What it says: the file, the line, and the text."""
    # The functions of pages are as short as those of most programs, which have no annotations.
    options = ("--strict", "--allow-untyped-defs", "--allow-untyped-calls", "--no-error-summary")
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--output", "json", "."],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode in (0, 1), ran.stderr
    found = map(json.loads, ran.stdout.splitlines())
    return [(each["file"], each["line"], each["message"]) for each in found]


def by_pyright(folder: Path) -> list[tuple[str, int, str]]:
    """Likewise; its strict mode wants types that other packages leave open."""
    options = {"pythonVersion": "3.10", "reportMissingTypeStubs": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "."]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode in (0, 1), ran.stderr
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return [(each["file"], 1 + each["range"]["start"]["line"], each["message"]) for each in found]


@pytest.fixture(scope="module", params=[by_mypy, by_pyright])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What a type checker says of each line of each program, in one run."""
    folder = tmp_path_factory.mktemp("programs")
    for name, program in programs().items():
        (folder / f"{name}.py").write_text(program)
    found: dict[str, dict[int, str]] = defaultdict(dict)
    check: Callable[[Path], list[tuple[str, int, str]]] = request.param
    for file, line, text in check(folder):
        if not MISSING.search(text):
            found[Path(file).stem].setdefault(line, text)
    return found


def test_program_passes_and_each_mistake_is_told(said: dict[str, dict[int, str]]) -> None:
    assert said["right"] == {}
    assert [*said["wrong"]] == [*range(2, 2 + len(MISTAKES))], said["wrong"]
    for line, name in zip(said["wrong"].values(), MISTAKES.values(), strict=True):
        assert name in line


def test_editor_shows_types_and_keywords(said: dict[str, dict[int, str]]) -> None:
    assert len(said["shown"]) == len(SHOWN), said["shown"]
    for text, names in zip(said["shown"].values(), SHOWN.values(), strict=True):
        assert all(name in text for name in names) and text != '"Any"', text


def test_code_and_names_of_the_pages_are_known(said: dict[str, dict[int, str]]) -> None:
    assert {name: lines for name, lines in said.items() if name.startswith("page_")} == {}
