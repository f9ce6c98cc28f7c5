"""``envhub serve --config``: a hub whose options and envs stand in a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hubs import serve
from pages import ROOT, blocks

import envhub

PAGE = ROOT / "server/docs/options.md"
FILE = """
lease = 7

[envs.arm]
env = "sims:counter"

[envs.pole]
env = "CartPole-v1"
"""


@pytest.mark.long
def test_hub_offers_the_envs_of_its_file_and_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text(FILE)
    arguments = ("Pendulum-v1", "--config", str(tmp_path / "hub.toml"))
    with serve(tmp_path, *arguments) as hub, envhub.connect(hub.ipc) as client:
        assert client.envs() == ["Pendulum-v1", "arm", "pole"]
        for name in client.envs():
            envs = client.make_vec(name, 2)
            envs.reset(seed=1)
            envs.close()


@pytest.mark.long
def test_file_of_the_page_serves(tmp_path: Path) -> None:
    (text,) = blocks("toml", [PAGE])
    (tmp_path / "hub.toml").write_text(text.replace(":5555", ":0"))
    arguments = ("--config", str(tmp_path / "hub.toml"))
    with serve(tmp_path, *arguments, binds=[f"ipc://{tmp_path}/hub.sock"]) as hub, envhub.connect(hub.ipc) as client:
        assert {"CartPole-v1", "heavy"} <= {*client.envs()}
        envs = client.make_vec("heavy", 2)
        assert envs.single_observation_space.shape == (3,)  # Pendulum's
        envs.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lese = 3", "hub.toml: unknown key 'lese', did you mean 'lease'?"),
        (
            'audit = "audit"',
            "hub.toml: unknown key 'audit'; there is no audit file any more: the lines of",
        ),
    ],
)
def test_file_that_cannot_be_used_ends_the_hub_with_2_and_a_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "hub.toml").write_text(text)
    command = [sys.executable, "-m", "envhub", "serve", "--config", str(tmp_path / "hub.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert why in ended.stderr
