"""The Dockerfile of the image of a hub, read as text, and what `envhub serve` makes of its arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path

from envhub_server.config import HubConfig
from envhub_server.serve import read_configuration

from envhub.cli import commands, serve

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
STAGES = {  # the text of each stage, by its name
    name or base: text.replace("\\\n", " ")
    for base, name, text in re.findall(r"^FROM (\S+)(?: AS (\S+))?$\n?(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
}
IMAGE, MUJOCO = STAGES["core"], STAGES["mujoco"]
HEALTH = ["envhub", "health", "ipc:///tmp/hub.sock", "--timeout", "3"]  # of the probes


def instruction(name: str, text: str = IMAGE) -> str:
    """Return the argument of the one instruction of this name."""
    (argument,) = re.findall(rf"^{name} +(.+)$", text, re.MULTILINE)
    return str(argument)


def command(text: str = IMAGE) -> list[str]:
    return list(json.loads(instruction("CMD", text)))


def config(arguments: list[str]) -> HubConfig:
    """Read arguments of ``envhub serve`` by the real command line."""
    serving, bound, unknown = commands.app.parse_args(arguments, exit_on_error=False, print_error=False)[:3]
    assert serving is serve.serve
    assert not unknown
    given = bound.arguments
    return read_configuration(given.get("env", ()), given.get("options"), given.get("config")).config
