"""What mypy and pyright say of a user's program: nothing of a right one, and each mistake of a wrong one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # the checkers read all that the program imports

RIGHT = """
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
    return envhub.make("CartPole-v1", on_crash="raise", env_kwargs={"render_mode": "rgb_array"})


def asked() -> list[str]:
    with envhub.connect("tcp://127.0.0.1:5555", timeout=3) as client:
        envs: envhub.HubVectorEnv = client.make_vec("CartPole-v1", 2, num_workers="auto", lane="wire")
        sizing: envhub.Sizing = envs.sizing
        print(sizing, envs.call("render"))
        return client.envs()


try:
    print(train(10, hub="tcp://127.0.0.1:5555", copy=False, step_timeout=10, gpus=[0]), one(), asked())
except (envhub.HubLost, envhub.EnvTimeout) as error:
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
    "envhub.make_vec": ("num_envs", "record", "RecordOptions", "HubVectorEnv"),
    "envhub.make_vec('CartPole-v1')": ("HubVectorEnv",),
    "envhub.make_vec('CartPole-v1').step(0)[1]": ("ndarray",),
    "envhub.make_vec('CartPole-v1').info_mode": ("batched", "by_env"),
    "envhub.make('CartPole-v1')": ("HubEnv",),
    "envhub.connect": ("timeout", "Client"),
}


def by_mypy(program: Path) -> dict[int, str]:
    """What it says of each line."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", program.name]
    ran = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=300)
    assert ran.returncode in (0, 1), ran.stderr
    found: dict[int, str] = {}
    for line in ran.stdout.splitlines():
        place, _, text = line.partition(": error: ")
        if text:
            found[int(place.split(":")[1])] = text
    return found


def by_pyright(program: Path) -> dict[int, str]:
    """What it says of each line, in its strictest mode but for what the types of other packages leave open."""
    options = {"pythonVersion": "3.10", "reportMissingTypeStubs": False}
    program.with_name("pyrightconfig.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, program.name]
    ran = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=300)
    assert ran.returncode in (0, 1), ran.stderr
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return {1 + each["range"]["start"]["line"]: each["message"] for each in found if each["severity"] == "error"}


@pytest.mark.parametrize("checked", [by_mypy, by_pyright])
def test_program_passes_and_each_mistake_is_told(checked: object, tmp_path: Path) -> None:
    assert callable(checked)
    program = tmp_path / "program.py"
    program.write_text(RIGHT)
    assert checked(program) == {}
    program.write_text("\n".join(["import envhub", *MISTAKES]))
    found = checked(program)
    assert [*found] == [*range(2, 2 + len(MISTAKES))], found
    for line, name in zip(found.values(), MISTAKES.values(), strict=True):
        assert name in line


def test_editor_shows_types_and_keywords(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("\n".join(["import envhub", *(f"reveal_type({each})" for each in SHOWN)]))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", program.name]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    shown = [line.partition("Revealed type is ")[2] for line in ran.stdout.splitlines()]
    assert len(shown) == len(SHOWN), ran.stdout
    for text, names in zip(shown, SHOWN.values(), strict=True):
        assert all(name in text for name in names) and text != '"Any"', text
