"""Every vector wrapper of Gymnasium over EnvHub gives what it gives over ``SyncVectorEnv`` and ``AsyncVectorEnv``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import gymnasium.wrappers.vector as wrappers
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from same import assert_same

import envhub

BOX = spaces.Box(-10, 10, (3, 3), np.float32)
SINGLE = spaces.Box(-10, 10, (3,), np.float32)
Wrap = Callable[[Any], Any]

WRAPS: dict[str, Wrap] = {
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "NormalizeObservation": wrappers.NormalizeObservation,
    "NormalizeReward": wrappers.NormalizeReward,
    "ClipReward": lambda envs: wrappers.ClipReward(envs, -1, 1),
    "TransformReward": lambda envs: wrappers.TransformReward(envs, lambda reward: reward * 2),
    "VectorizeTransformReward": lambda envs: wrappers.VectorizeTransformReward(
        envs, gym.wrappers.TransformReward, func=lambda reward: reward * 2
    ),
    "ClipAction": wrappers.ClipAction,
    "RescaleAction": lambda envs: wrappers.RescaleAction(envs, -1.0, 1.0),
    "TransformAction": lambda envs: wrappers.TransformAction(envs, lambda action: action / 2),
    "VectorizeTransformAction": lambda envs: wrappers.VectorizeTransformAction(
        envs, gym.wrappers.TransformAction, func=lambda action: action / 2, action_space=None
    ),
    "TransformObservation": lambda envs: wrappers.TransformObservation(envs, lambda seen: seen * 2, BOX, SINGLE),
    "VectorizeTransformObservation": lambda envs: wrappers.VectorizeTransformObservation(
        envs, gym.wrappers.FlattenObservation
    ),
    "FlattenObservation": wrappers.FlattenObservation,
    "RescaleObservation": lambda envs: wrappers.RescaleObservation(envs, np.float32(-1), np.float32(1)),
    "ReshapeObservation": lambda envs: wrappers.ReshapeObservation(envs, (3, 1)),
    "DtypeObservation": lambda envs: wrappers.DtypeObservation(envs, np.float64),
    "DictInfoToList": wrappers.DictInfoToList,
    "ArrayConversion": lambda envs: wrappers.ArrayConversion(envs, np, np),
}
WRAPS_OF_IMAGES: dict[str, Wrap] = {
    "FilterObservation": lambda envs: wrappers.FilterObservation(envs, ["pixels"]),
    "GrayscaleObservation": lambda envs: wrappers.GrayscaleObservation(wrappers.TransformObservation(envs, *PIXELS)),
    "ResizeObservation": lambda envs: wrappers.ResizeObservation(wrappers.TransformObservation(envs, *PIXELS), (8, 9)),
}
OF_OTHER_LIBRARIES = {"JaxToNumpy": "jax", "JaxToTorch": "jax", "NumpyToTorch": "torch"}
SHOWING = {"RecordVideo", "HumanRendering"}


def pendulum() -> gym.Env[Any, Any]:
    env = gym.make("Pendulum-v1", max_episode_steps=20)
    return gym.wrappers.TransformObservation(env, lambda seen: seen, spaces.Box(-10, 10, (3,), np.float32))


# One refuses masks; of the other upstream takes the mask away before it sees it, see test_defects.py.
UNMASKED = {"NormalizeObservation", "RecordEpisodeStatistics"}


def run(envs: Any, wrap: Wrap, masked: bool) -> list[Any]:
    wrapped = wrap(envs)
    wrapped.action_space.seed(4)
    found = [wrapped.reset(seed=2)]
    for step in range(50):
        found.append(wrapped.step(wrapped.action_space.sample()))
        if step == 30 and masked:
            found.append(wrapped.reset(options={"reset_mask": np.array([True, False, True])}))
    wrapped.close()
    return found


def compare(factory: Callable[[], gym.Env[Any, Any]], name: str, wrap: Wrap, mode: AutoresetMode) -> None:
    results = []
    for kind in (envhub.AsyncVectorEnv, SyncVectorEnv, AsyncVectorEnv):
        envs = kind([factory] * 3, autoreset_mode=mode)
        try:
            results.append(run(envs, wrap, name not in UNMASKED))
        except (ValueError, BufferError) as error:  # some refuse SAME_STEP, or what infos hold then
            envs.close()
            results.append([str(error)])
    found, *others = results
    for wanted in others:
        for number, (left, right) in enumerate(zip(found, wanted, strict=True)):
            if name == "RecordEpisodeStatistics" and number:  # whose times are those of the clock
                for record in (left, right):
                    without_times(record[-1])
            assert_same(left, right, f"record {number}")


def without_times(infos: dict[str, Any]) -> None:
    infos.get("episode", {}).pop("t", None)
    infos.get("final_info", {}).get("episode", {}).pop("t", None)


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", [AutoresetMode.NEXT_STEP, pytest.param(AutoresetMode.SAME_STEP, marks=pytest.mark.chaos)]
)
@pytest.mark.parametrize("name", WRAPS)
def test_wrapper_gives_what_it_gives_over_gymnasiums(name: str, mode: AutoresetMode) -> None:
    compare(pendulum, name, WRAPS[name], mode)


class Pixels(gym.Env[Any, Any]):
    """Observes a picture and a number, and shows the picture."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = spaces.Dict({"pixels": spaces.Box(0, 255, (12, 16, 3), np.uint8), "count": spaces.Discrete(99)})
    action_space = spaces.Discrete(2)
    render_mode = "rgb_array"
    count = 0

    def observe(self) -> Any:
        return {"pixels": self.render(), "count": self.count}

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.random.default_rng(self.count).integers(0, 256, (12, 16, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self.observe(), 1.0, self.count >= 10, False, {}


PIXELS = (
    lambda seen: seen["pixels"],
    spaces.Box(0, 255, (3, 12, 16, 3), np.uint8),
    spaces.Box(0, 255, (12, 16, 3), np.uint8),
)


@pytest.mark.long
@pytest.mark.parametrize("name", WRAPS_OF_IMAGES)
def test_wrapper_of_images_gives_what_it_gives_over_gymnasiums(name: str) -> None:
    compare(Pixels, name, WRAPS_OF_IMAGES[name], AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("name", OF_OTHER_LIBRARIES)
def test_wrapper_of_another_library_gives_its_arrays(name: str) -> None:
    pytest.importorskip(OF_OTHER_LIBRARIES[name])
    wrapper = getattr(wrappers, name)
    for kind in (envhub.AsyncVectorEnv, SyncVectorEnv):
        envs = wrapper(kind([pendulum] * 3))
        observations, _ = envs.reset(seed=1)
        assert observations.shape == (3, 3)
        envs.close()


@pytest.mark.long
def test_videos_are_recorded_and_frames_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    videos = {}
    for kind in (envhub.AsyncVectorEnv, SyncVectorEnv):
        folder = tmp_path / kind.__name__
        envs = wrappers.RecordVideo(
            kind([Pixels] * 3), str(folder), step_trigger=lambda step: step == 2, video_length=5
        )
        shown = wrappers.HumanRendering(envs, (64, 48))
        shown.reset(seed=1)
        for _ in range(10):
            shown.step([0, 1, 0])
        shown.close()
        (video,) = folder.glob("*.mp4")
        videos[kind] = video.read_bytes()
    assert len(set(videos.values())) == 1


def test_every_wrapper_is_accounted_for() -> None:
    assert set(wrappers.__all__) == set(WRAPS) | set(WRAPS_OF_IMAGES) | set(OF_OTHER_LIBRARIES) | SHOWING
