"""Extras bring all that their features import, each in a virtual environment; a missing one is told by its name."""

from __future__ import annotations

import importlib.util
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
        ("top", "import envhub_client.tools.top"),
        ("web", "import envhub_server.web.page"),
        pytest.param("atari", STEP.format(env="ALE/Pong-v5"), marks=pytest.mark.chaos),
        pytest.param("mujoco", STEP.format(env="HalfCheetah-v5"), marks=pytest.mark.chaos),
        pytest.param("dm-control", STEP.format(env="dm_control/cartpole-swingup-v0"), marks=pytest.mark.chaos),
    ],
    ids=["record", "top", "web", "atari", "mujoco", "dm-control"],
)
def test_extra_is_all_that_its_feature_needs(run: Callable[[str, str], None], extra: str, program: str) -> None:
    run(extra, program)


FRAMEWORKS = {"rllib": "ray", "sb3": "stable_baselines3", "tianshou": "tianshou", "torchrl": "torchrl"}
PROGRAM = """
import sys
for name in sys.argv[2:]:
    try:
        exec(sys.argv[1].format(name), {})
    except ModuleNotFoundError as error:
        print(f"{name}: {error}")
"""


@pytest.mark.parametrize("use", ["import envhub; envhub.{0}", "import envhub.{0}", "from envhub import {0}"])
def test_missing_framework_is_told_with_what_to_install(use: str) -> None:
    missing = [name for name, package in FRAMEWORKS.items() if not importlib.util.find_spec(package)]
    if not missing:
        pytest.skip("all of them are installed")
    program = [sys.executable, "-c", PROGRAM, use, *missing]
    ran = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    for name, line in zip(missing, ran.stdout.splitlines(), strict=True):
        assert line.startswith(f"{name}: No module named ")
        assert line.endswith(f'; envhub.{name} needs `pip install "envhub-rl[{name}]"`')


@pytest.mark.long
@pytest.mark.parametrize(
    "use",
    [
        "from envhub.fleet import Fleet",
        "import envhub; envhub.make_vec('A', hub='ray://a')",
        "import sys; from envhub.cli import main; sys.argv = ['envhub', 'fleet', 'down', 'a']; main()",
    ],
)
def test_missing_ray_is_named_with_what_to_install(use: str) -> None:
    if importlib.util.find_spec("ray"):
        pytest.skip("it is installed")
    ran = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, timeout=60)
    assert "pip install" in ran.stderr and "envhub-rl[ray]" in ran.stderr
