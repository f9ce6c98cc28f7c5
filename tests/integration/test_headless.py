"""Frames without a screen, by the library that each environment names; one that does not work is told at the start."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hubs import ServedHub, serve, wait_until

import envhub

LIBRARIES = {"egl": ("EGL", "libEGL.so.1"), "osmesa": ("OSMesa", "libOSMesa.so.8")}
INSTALL = {"egl": "libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri", "osmesa": "libosmesa6"}
HUB = """
[envs.egl]
env = "HalfCheetah-v5"
rendering = "egl"

[envs.osmesa]
env = "HalfCheetah-v5"
rendering = "osmesa"

[envs.hidden]
env = "HalfCheetah-v5"
rendering = "egl"
variables = { __EGL_VENDOR_LIBRARY_DIRS = "/nowhere" }

[envs.CartPole-v1]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    folder = tmp_path_factory.mktemp("hub")
    (folder / "hub.toml").write_text(HUB)
    with serve(folder, "--config", str(folder / "hub.toml"), environ={"MUJOCO_GL": "disabled"}) as hub:
        yield hub


def needs(backend: str) -> None:
    name, file = LIBRARIES[backend]
    try:
        ctypes.CDLL(ctypes.util.find_library(name) or file)
    except OSError:
        pytest.skip(f"this machine has no lib{name}: apt-get install {INSTALL[backend]}")


def mapped(hub: ServedHub) -> list[str]:
    """What files each worker of the hub has mapped."""
    found = []
    for worker in hub.workers():
        with contextlib.suppress(OSError):  # one that tries the rendering has ended meanwhile
            found.append(Path(f"/proc/{worker.pid}/maps").read_text())
    return found


@pytest.mark.long
@pytest.mark.parametrize("backend", ["egl", "osmesa"])
def test_frames_of_half_cheetah(served: ServedHub, backend: str) -> None:
    needs(backend)
    envs = envhub.make_vec(backend, 2, hub=served.tcp, num_workers=2, render_mode="rgb_array")
    envs.reset(seed=1)
    first = envs.render([0])[0]
    assert first.shape == (480, 480, 3) and first.dtype == np.uint8 and first.std() > 10
    for _ in range(10):
        envs.step(np.ones((2, 6), np.float32))
    assert (envs.render([0])[0] != first).mean() > 0.01
    assert any(f"lib{LIBRARIES[backend][0]}" in files for files in mapped(served))
    envs.close()


@pytest.mark.long
def test_rendering_that_does_not_work_is_told_with_what_to_do(served: ServedHub) -> None:
    needs("egl")

    def unready() -> list[str]:
        return [line for line in served.log.splitlines() if '"env_unready"' in line and '"hidden"' in line]

    assert wait_until(lambda: bool(unready()))
    (line,) = unready()
    assert "rendering by egl does not work" in line
    with pytest.raises(envhub.RequestRefused) as caught:
        envhub.make_vec("hidden", 1, hub=served.tcp)
    text = str(caught.value)
    assert "EGL has no device" in text and "docker run --device /dev/dri" in text and "\n" not in text
    assert "apt-get install libegl-mesa0 libgl1-mesa-dri" in text
    envs = envhub.make_vec("CartPole-v1", 1, hub=served.tcp)
    envs.close()


@pytest.mark.long
def test_option_of_the_hub_holds_for_envs_that_say_nothing(tmp_path: Path) -> None:
    needs("osmesa")
    with serve(tmp_path, "HalfCheetah-v5", "--rendering", "osmesa", environ={"MUJOCO_GL": "disabled"}) as hub:
        envs = envhub.make_vec("HalfCheetah-v5", 1, hub=hub.tcp, render_mode="rgb_array")
        envs.reset(seed=1)
        assert envs.render()[0].std() > 10 and any("libOSMesa" in files for files in mapped(hub))
        envs.close()
        assert "env_unready" not in hub.log
