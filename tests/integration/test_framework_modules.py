"""``envhub.sb3`` and its like are imported when they are used, and say what is to be installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

FRAMEWORKS = {
    "rllib": "ray",
    "sb3": "stable_baselines3",
    "tianshou": "tianshou",
    "torchrl": "torchrl",
}
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
