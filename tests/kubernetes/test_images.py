"""The images of docker/Dockerfile in containers: their health at any address, and frames without a screen.

`nox -s containers` builds them; they need a Docker engine on this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hubs import wait_until
from pods import IMAGE, docker

pytestmark = [pytest.mark.container, pytest.mark.timeout(600)]

CONFINED = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
AT_ONCE = ["--health-start-interval", "500ms", "--health-interval", "1s"]
FILE = """
bind = ["ipc:///tmp/hub.sock"]
[envs.egl]
env = "HalfCheetah-v5"
rendering = "egl"
[envs.osmesa]
env = "HalfCheetah-v5"
rendering = "osmesa"
"""
FRAMES = """
import contextlib, sys
import envhub

for name in ("egl", "osmesa"):
    options = {"hub": "ipc:///tmp/hub.sock", "env_kwargs": {"render_mode": "rgb_array"}}
    with contextlib.closing(envhub.make_vec(name, 2, **options)) as envs:
        envs.reset(seed=1)
        frame = envs.render()[0]
        print(name, frame.shape, frame.std() > 10)
"""


@contextmanager
def running(image: str, *options: str, arguments: tuple[str, ...] = ()) -> Iterator[str]:
    name = f"envhub-test-{os.getpid()}-image"
    docker("run", "--detach", "--name", name, *CONFINED, *AT_ONCE, *options, image, *arguments)
    try:
        yield name
    finally:
        docker("rm", "--force", "--volumes", name)


def health(name: str) -> dict[str, object]:
    return dict(json.loads(docker("inspect", "--format", "{{json .State.Health}}", name).stdout))


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), ()),
        ((), ("serve", "CartPole-v1")),
        (("--network", "host"), ("serve", "CartPole-v1", "--bind", "ipc:///tmp/other.sock")),
        (("--env", "ENVHUB_ADDRESS=tcp://127.0.0.1:5"), ("serve", "CartPole-v1", "--bind", "tcp://127.0.0.1:5")),
    ],
    ids=["usual", "default", "host", "tcp"],
)
@pytest.mark.parametrize("image", [IMAGE, f"{IMAGE}:mujoco"])
def test_hub_of_an_image_is_healthy(image: str, options: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    with running(image, *options, arguments=arguments) as name:
        assert wait_until(lambda: health(name)["Status"] == "healthy"), (health(name), docker("logs", name).stderr)
        assert docker("exec", name, "id", "-u").stdout == "10001\n"


def test_image_of_mujoco_draws_without_a_screen(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text(FILE)
    (tmp_path / "frames.py").write_text(FRAMES)
    mounts = [part for file in tmp_path.iterdir() for part in ("--volume", f"{file}:/etc/{file.name}:ro")]
    with running(f"{IMAGE}:mujoco", *mounts, arguments=("serve", "--config", "/etc/hub.toml")) as name:
        assert wait_until(lambda: health(name)["Status"] == "healthy"), health(name)
        printed = docker("exec", name, "python", "/etc/frames.py").stdout
        assert printed.splitlines() == ["egl (480, 480, 3) True", "osmesa (480, 480, 3) True"]
