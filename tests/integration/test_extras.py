"""Extras bring everything that their features import: each is installed into a virtual environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]

RECORD = """
import envhub, minari, numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class Plain(CartPoleEnv):
    def render(self):
        return np.zeros((32, 48, 3), np.uint8)

options = envhub.RecordOptions("kept", film=[0])
envs = envhub.make_vec(lambda: Plain(render_mode="rgb_array"), 2, record=options)
envs.reset(seed=1)
for _ in range(30):
    envs.step([1, 1])
envs.close()
folder = envs.recorded.folder
assert minari.MinariDataset(folder / "data").total_episodes == envs.recorded.episodes > 1, envs.recorded
assert [*(folder / "films").iterdir()]
"""

STEP = """
import envhub
envs = envhub.make_vec({env!r}, 2)
envs.reset(seed=1)
envs.step(envs.action_space.sample())
envs.close()
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str, str], None]:
    """Runs a program with the packages of an extra, and no others."""

    def run_with(extra: str, program: str) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
        own = str(tmp_path / "venv/bin/python")
        subprocess.run([own, "-m", "pip", "install", "-q", *wanted], check=True)
        path = os.pathsep.join(map(str, (ROOT, ROOT / "server", ROOT / "client")))
        environ = {**os.environ, "PYTHONPATH": path}
        subprocess.run([own, "-c", program], check=True, env=environ, cwd=tmp_path)

    return run_with


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("extra", "program"),
    [
        ("record", RECORD),
        pytest.param("atari", STEP.format(env="ALE/Pong-v5"), marks=pytest.mark.chaos),
        pytest.param("mujoco", STEP.format(env="HalfCheetah-v5"), marks=pytest.mark.chaos),
        pytest.param("dm-control", STEP.format(env="dm_control/cartpole-swingup-v0"), marks=pytest.mark.chaos),
    ],
    ids=["record", "atari", "mujoco", "dm-control"],
)
def test_extra_is_all_that_its_feature_needs(run: Callable[[str, str], None], extra: str, program: str) -> None:
    run(extra, program)
