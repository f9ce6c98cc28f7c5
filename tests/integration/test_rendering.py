"""Frames of envs that die: an env that was made again and not yet reset shows its last frame, or a blank one."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import sims
from envhub_client.private_hub.process import private_hub
from gymnasium.vector import SyncVectorEnv
from hubs import ServedHub, serve, wait_until
from same import assert_same

import envhub

DIES, RAISES = 3, 1


@contextlib.contextmanager
def made(address: str | None, num_envs: int = 2, **options: Any) -> Iterator[envhub.HubVectorEnv]:
    """Envs of which each has a worker of its own, that were reset."""
    options = {"num_workers": num_envs, **options}
    if address is None:
        envs = envhub.make_vec(sims.Shown, num_envs, **options)
    else:
        envs = envhub.make_vec("shown", num_envs, hub=address, **options)
    try:
        envs.reset(seed=1)
        yield envs
    finally:
        envs.close()


def step(envs: envhub.HubVectorEnv, *actions: int) -> tuple[Any, ...]:
    return envs.step(np.array(actions))


def values(frames: tuple[np.ndarray, ...]) -> list[int]:
    """The one value of every frame."""
    assert all(frame.shape == (16, 24, 3) and frame.dtype == np.uint8 for frame in frames)
    return [int(frame.max()) for frame in frames]


def test_env_that_died_shows_its_last_frame_until_it_is_reset(address: str | None) -> None:
    with made(address) as envs:
        step(envs, 0, 0)
        step(envs, 0, 0)
        assert values(envs.render()) == [2, 2]
        assert step(envs, DIES, 0)[3].tolist() == [True, False]
        first = envs.render()
        assert values(first) == [2, 3]
        first[0][:] = 77  # is the caller's
        assert values(envs.render()) == [2, 3]
        step(envs, 0, 0)
        assert values(envs.render()) == [0, 4]


def test_envs_that_nobody_has_seen_show_their_first_frames(address: str | None) -> None:
    with made(address) as envs:
        assert step(envs, DIES, DIES)[3].tolist() == [True, True]
        assert values(envs.render()) == [0, 0]
        assert step(envs, 0, 0)[0][:, 0].tolist() == [0, 0]  # is their reset
        step(envs, 0, DIES)
        assert values(envs.render()) == [1, 0]


@pytest.mark.long
def test_env_that_dies_when_it_is_seen_first_is_blank_and_dies_once(address: str | None) -> None:
    with made(address) as envs:
        envs.set_attr("doomed", True)
        step(envs, DIES, DIES)
        for _ in range(2):
            assert [(frame.shape, frame.any()) for frame in envs.render()] == [((64, 64, 3), False)] * 2
        envs.set_attr("doomed", False)
        assert step(envs, 0, 0)[3].tolist() == [False, False]  # no episode was lost by it
        assert values(envs.render()) == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
@pytest.mark.parametrize("vector", [False, True])
def test_env_that_cannot_be_reset_to_be_shown_is_blank(error: type[BaseException], vector: bool) -> None:
    env: Any = sulking_vectors if vector else Sulking
    with contextlib.closing(envhub.make_vec(env, 3, vector=vector, num_workers=1, on_exception="truncate")) as envs:
        envs.reset(seed=1)
        step(envs, RAISES, RAISES, RAISES)
        envs.set_attr("error", [error] * 3)
        assert [frame.shape for frame in envs.render()] == [(64, 64, 3)] * 3
        assert envs.get_attr("resets") == ((1, 0, 0) if vector else (1, 1, 1))  # the first that raises is the last
        envs.set_attr("error", [None] * 3)
        assert not step(envs, 0, 0, 0)[3].any()
        assert values(envs.render()) == [0, 0, 0]


class Sulking(sims.Shown):
    """Counts its resets, ends none while the file ``held`` is there, and raises its ``error`` there if it has one."""

    error: Any = None
    resets, held = 0, ""

    def reset(self, **how: Any) -> Any:
        self.resets += 1
        while self.held and Path(self.held).exists():
            time.sleep(0.01)
        if self.error is not None:
            raise self.error("no reset now")
        return super().reset(**how)


def sulking_vectors(num_envs: int) -> Any:
    return Mosaic([Sulking] * num_envs)


def test_wait_for_frames_ends_at_its_timeout_while_an_env_is_reset_to_be_shown(tmp_path: Path) -> None:
    (held := tmp_path / "held").touch()
    with contextlib.closing(envhub.make_vec(Sulking, 1, on_exception="truncate")) as envs:
        envs.reset(seed=1)
        step(envs, RAISES)
        envs.set_attr("held", str(held))
        envs.call_async("render")
        with pytest.raises(envhub.HubTimeout):
            envs.call_wait(0.3)
        held.unlink()
        assert values(envs.call_wait()) == [0]
        assert not step(envs, 0)[3].any()


def test_env_that_renders_for_humans_is_not_reset_to_be_shown() -> None:
    with contextlib.closing(envhub.make_vec(OnScreen, 1, on_exception="truncate")) as envs:
        envs.reset(seed=1)
        step(envs, RAISES)
        assert envs.render() == (None,) and envs.get_attr("resets") == (0,)


class OnScreen(Sulking):
    metadata = {"render_modes": ["human"]}

    def __init__(self) -> None:
        super().__init__()
        self.render_mode = "human"

    def render(self) -> Any:
        return None


@pytest.mark.long
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("seed", [3, None])
def test_showing_a_new_env_changes_nothing_else(vector: bool, seed: int | None) -> None:
    seen = []
    for renders in (False, True):
        env: Any = vectors if vector else Drawing
        options: dict[str, Any] = {"num_workers": 1, "vector": vector, "on_exception": "truncate"}
        with contextlib.closing(envhub.make_vec(env, 2, **options)) as envs:
            envs.reset(seed=seed)
            failed = step(envs, RAISES, RAISES)
            assert failed[3].all()
            if renders:
                assert values(envs.render()) == [0, 0]
            steps = [step(envs, 0, 0) for _ in range(3)]
            seen.append([failed[0], *(part for each in steps for part in each[:4])])
            step(envs, RAISES, 0)
            assert envs.reset(seed=9)[0][:, 0].tolist() == [0, 0]
    if seed is not None:
        for found, wanted in zip(*seen, strict=True):
            assert_same(found, wanted, "step")


class Drawing(sims.Shown):
    """Observes random numbers, too."""

    def observation(self) -> np.ndarray:
        return np.array([self.count, self.np_random.random()])


def vectors(num_envs: int) -> Any:
    return Mosaic([Drawing] * num_envs)


class Mosaic(SyncVectorEnv):
    """Renders as vector envs do."""

    render_mode = "rgb_array"

    def render(self) -> Any:
        return tuple(env.render() for env in self.envs)


def test_env_that_dies_while_it_renders_is_truncated_by_the_next_step(address: str | None) -> None:
    with made(address) as envs:
        step(envs, 0, 0)
        assert values(envs.render()) == [1, 1]
        envs.set_attr("doomed", [True, False])
        step(envs, 0, 0)
        assert values(envs.render()) == [1, 2]
        assert step(envs, 0, 0)[3].tolist() == [True, False]


def test_death_in_a_rendering_is_raised_where_deaths_are(address: str | None) -> None:
    with made(address, on_crash="raise") as envs:
        envs.set_attr("doomed", [True, False])
        with pytest.raises(envhub.WorkerDied):
            envs.render()


def test_env_that_was_made_again_in_its_process_shows_its_last_frame(address: str | None) -> None:
    with made(address, on_exception="truncate") as envs:
        step(envs, 0, 0)
        envs.render()
        step(envs, RAISES, 0)
        assert values(envs.render()) == [1, 2]


@pytest.mark.long
def test_env_of_a_lost_hub_shows_its_last_frame() -> None:
    with made(None, on_hub_loss="recreate") as envs:
        step(envs, 0, 0)
        envs.render()
        hub = psutil.Process(private_hub().pid)
        hub.kill()
        hub.wait()
        assert step(envs, 0, 0)[3].all()
        assert values(envs.render()) == [1, 1]


def test_env_that_was_not_reset_at_all_says_so(address: str | None) -> None:
    envs = envhub.make_vec(sims.Shown, 2) if address is None else envhub.make_vec("shown", 2, hub=address)
    with contextlib.closing(envs), pytest.raises(gym.error.ResetNeeded):
        envs.render()


def test_only_chosen_envs_are_rendered(address: str | None) -> None:
    with made(address, 3) as envs:
        step(envs, 0, 0, 0)
        envs.set_attr("doomed", [True, False, False])  # env 0 would die if it were rendered
        assert values(envs.render([2, 1])) == [1, 1]
        step(envs, 0, DIES, 0)
        assert values(envs.render([2, 1])) == [2, 1]
        assert step(envs, 0, 0, 0)[3].tolist() == [False] * 3
        for wrong in ([3], [1, 1], [-1], []):
            with pytest.raises(ValueError, match="env_ids"):
                envs.render(wrong)


def test_calls_of_render_go_on_as_render_does(address: str | None) -> None:
    with made(address) as envs:
        step(envs, 0, 0)
        assert values(envs.call("render")) == [1, 1]
        step(envs, DIES, 0)
        assert values(envs.call("render")) == [1, 2]
        assert values(envs.get_attr("render", [0])) == [1]
        assert values(envs.call_some([1, 0], "render")) == [2, 1]
        envs.call_async("render")
        assert values(envs.call_wait()) == [1, 2]
        step(envs, 0, 0)
        envs.set_attr("doomed", [False, True])
        envs.call_async("render")  # env 1 dies in this one
        assert values(envs.call_wait()) == [0, 2]
        assert step(envs, 0, 0)[3].tolist() == [False, True]


def test_single_env_shows_its_last_frame() -> None:
    with contextlib.closing(envhub.make(sims.Shown)) as env:
        env.reset(seed=1)
        env.step(0)
        assert values((env.render(),)) == [1]
        assert env.step(DIES)[3]
        assert values((env.render(),)) == [1]


# --- without a screen -------------------------------------------------------------------------------------------------


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
