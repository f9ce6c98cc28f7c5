"""The examples with SB3, tianshou and TorchRL train until they have learned, and the programs of their pages run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hubs import serve
from pages import ROOT, blocks

EXAMPLES = ROOT / "client/examples"
PROGRAMS = blocks("python torch")
LINES_MAX = 100
NAMES = ["sb3_ppo.py", "sb3_dqn.py", "tianshou_dqn.py", "torchrl_ppo.py"]
LEARNED = 475.0  # the mean return of 50 episodes, after as many steps as the example takes by itself


def ran(example: str, *arguments: str) -> float:
    """The mean return that the example prints."""
    command = [sys.executable, EXAMPLES / example, *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr
    found = re.search(r"mean return of 50 episodes: ([\d.]+)", output.stdout)
    assert found, output.stdout
    return float(found[1])


@pytest.mark.parametrize("example", NAMES)
def test_example_is_short_and_trains_over_tcp(example: str, tmp_path: Path) -> None:
    assert len((EXAMPLES / example).read_text().splitlines()) <= LINES_MAX
    with serve(tmp_path, "CartPole-v1") as hub:
        assert 5 < ran(example, "--steps", "2048", "--hub", hub.tcp) <= 500


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("example", NAMES)
def test_example_learns(example: str) -> None:
    assert ran(example) >= LEARNED


def test_vec_env_of_sb3_is_stepped_behind_gymnasiums_interface() -> None:
    command = [sys.executable, EXAMPLES / "other_vector_env.py"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(output.split()[0]) > 100


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program_of_a_page_runs(number: int, tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1") as hub:
        program = PROGRAMS[number].replace("tcp://127.0.0.1:5555", hub.tcp)
        subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["sb3.HubVecEnv", "tianshou.HubVectorEnv", "torchrl.make_env", "legacy_infos"])
def test_framework_is_imported_when_it_is_used(name: str) -> None:
    program = f"import sys, envhub; assert 'torch' not in sys.modules; print(envhub.{name}.__module__)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("envhub_client.frameworks."), ran.stderr
