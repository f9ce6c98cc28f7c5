"""``envhub.sb3`` and its like are imported when they are used, and say what is to be installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

FRAMEWORKS = {
    "minari": "minari",
    "rllib": "ray",
    "sb3": "stable_baselines3",
    "tianshou": "tianshou",
    "torchrl": "torchrl",
}


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("use", ["import envhub; envhub.{0}", "import envhub.{0}", "from envhub import {0}"])
def test_missing_framework_is_told_with_what_to_install(name: str, use: str) -> None:
    if importlib.util.find_spec(FRAMEWORKS[name]):
        pytest.skip("it is installed")
    ran = subprocess.run([sys.executable, "-c", use.format(name)], capture_output=True, text=True, check=False)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: No module named ")
    assert last.endswith(f'; envhub.{name} needs `pip install "envhub-rl[{name}]"`')
