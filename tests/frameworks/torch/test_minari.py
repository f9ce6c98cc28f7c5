"""Minari data sets of vector envs: what steps returned, bit for bit, in the right episodes, with their environment."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeAwareObservation
from hubs import kill_worker, serve, worker_pid, worker_pids

import envhub
import envhub.minari

NUM_ENVS, STEPS = 3, 60
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


@pytest.fixture(autouse=True)
def _datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


class Parts(gymnasium.Env[Any, Any]):
    """Observations of images and numbers that differ in every step, and episodes of 5 + ``place`` steps."""

    observation_space = gymnasium.spaces.Dict(
        {"image": gymnasium.spaces.Box(0, 255, (32, 40, 3), np.uint8), "at": gymnasium.spaces.Discrete(1000)}
    )
    action_space = gymnasium.spaces.Tuple([gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(4)])

    def __init__(self, place: int) -> None:
        self.place = place

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        ended = self.at == 5 + self.place
        return self._shown(), float(action[1]), ended and not self.place, ended and bool(self.place), {}

    def _shown(self) -> dict[str, Any]:
        return {"image": self.np_random.integers(0, 256, (32, 40, 3)).astype(np.uint8), "at": np.int64(self.at)}


def own_episodes(env: gymnasium.Env[Any, Any], seed: int, actions: list[Any], mode: AutoresetMode) -> list[Any]:
    """What a single env gives when it is stepped as in a vector env, as (observations, actions, rewards, flags)."""
    episodes: list[Any] = []
    observation, _ = env.reset(seed=seed)
    running: Any = ([observation], [], [], [], [])
    for action in actions:
        if running is None:
            running = ([env.reset()[0]], [], [], [], [])
            if mode is AutoresetMode.NEXT_STEP:
                continue
        observation, reward, terminated, truncated, _ = env.step(action)
        for values, value in zip(running, (observation, action, reward, terminated, truncated), strict=True):
            values.append(value)
        if terminated or truncated:
            episodes.append(running)
            running = None
    if running is not None and running[2]:
        running[4][-1] = True
        episodes.append(running)
    return episodes


def leaves(data: Any) -> list[np.ndarray]:
    """Every array of an episode's observations or actions, whether they stand in columns or one by one."""
    if isinstance(data, list) and data and isinstance(data[0], dict):
        data = {key: [element[key] for element in data] for key in data[0]}
    elif isinstance(data, list) and data and isinstance(data[0], tuple):
        data = tuple(zip(*data, strict=True))
    if isinstance(data, dict):
        return [np.asarray(data[key]) for key in sorted(data)]
    return [np.asarray(part) for part in data] if isinstance(data, tuple) else [np.asarray(data)]


def assert_same(found: Any, wanted: Any) -> None:
    assert [(a.dtype, a.shape) for a in leaves(found)] == [(b.dtype, b.shape) for b in leaves(wanted)]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(leaves(found), leaves(wanted), strict=True))


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["CartPole-v1", "parts"])
def test_data_are_what_single_envs_give(kind: str, mode: AutoresetMode, copy: bool) -> None:
    make: list[Any] = [functools.partial(Parts, place) for place in range(NUM_ENVS)]
    if kind != "parts":
        make = [functools.partial(gymnasium.make, kind)] * NUM_ENVS
    envs: Any = envhub.make_vec(make, NUM_ENVS, autoreset_mode=mode, copy=copy, num_workers=1)
    envs.action_space.seed(1)
    actions = [envs.action_space.sample() for _ in range(STEPS)]
    with envhub.minari.record(envs, "kinds/random-v0", algorithm_name="random") as recorder:
        recorder.reset(seed=7)
        for action in actions:
            _, _, terminated, truncated, _ = recorder.step(action)
            if mode is AutoresetMode.DISABLED and (ended := terminated | truncated).any():
                recorder.reset(options={"reset_mask": ended})
    by_env = [[*gymnasium.vector.utils.iterate(envs.action_space, action)] for action in actions]
    wanted = [own_episodes(make[row](), 7 + row, [each[row] for each in by_env], mode) for row in range(NUM_ENVS)]
    dataset = minari.load_dataset("kinds/random-v0")
    assert dataset.storage.metadata["algorithm_name"] == "random"
    assert dataset.total_episodes == recorder.dataset.total_episodes == sum(map(len, wanted))
    found = [*dataset.iterate_episodes()]
    for episodes in wanted:
        for observations, taken, rewards, terminated, truncated in episodes:
            (place,) = [
                place
                for place, episode in enumerate(found)
                if len(episode.rewards) == len(rewards)
                and leaves(episode.observations)[-1].tobytes() == leaves(observations)[-1].tobytes()
            ]
            episode = found.pop(place)
            assert_same(episode.observations, observations)
            assert_same(episode.actions, taken)
            assert episode.rewards.tolist() == rewards
            assert episode.terminations.tolist() == terminated and episode.truncations.tolist() == truncated
    assert not found and recorder.left_out == 0


def test_seeds_stand_with_the_episodes_that_they_began() -> None:
    with envhub.minari.record(envhub.make_vec("CartPole-v1", 2, num_workers=1), "seeds-v0") as envs:
        envs.reset(seed=[5, None])
        envs.step(np.zeros(2, int))
        envs.reset(seed=8)
        envs.step(np.zeros(2, int))
    kept = [metadata.get("seed") for metadata in envs.dataset.storage.get_episode_metadata(range(4))]
    assert kept == [5, None, 8, 9]


@pytest.mark.parametrize("mode", MODES)
def test_episodes_that_a_crash_cuts_short_are_left_out(mode: AutoresetMode) -> None:
    others = worker_pids()  # of sessions that nobody has closed
    envs = envhub.make_vec("Pendulum-v1", 2, num_workers=2, autoreset_mode=mode)
    with envhub.minari.record(envs, "crash-v0") as recorder:
        recorder.reset(seed=1)
        shown = []
        for step in range(12):
            if step == 5:
                kill_worker(worker_pid(others))
            observations, _, _, truncated, _ = recorder.step(np.zeros((2, 1), np.float32))
            shown.append(observations)
            if truncated.any() and mode is AutoresetMode.DISABLED:
                shown[-1], _ = recorder.reset(options={"reset_mask": truncated})
    assert recorder.left_out == 1
    kept = sorted(minari.load_dataset("crash-v0").iterate_episodes(), key=lambda episode: len(episode.rewards))
    assert [len(episode.rewards) for episode in kept] == [6 if mode is AutoresetMode.DISABLED else 5, 12]
    cut = next(row for row in range(2) if (kept[1].observations[1:] != np.array(shown)[:, row]).any())
    assert np.array_equal(kept[0].observations, np.array(shown)[-len(kept[0].observations) :, cut])
    assert (kept[0].rewards != 0).all() and kept[0].truncations.tolist() == [False] * (len(kept[0].rewards) - 1) + [
        True
    ]


class CountsAndRaises(gymnasium.Env[Any, Any]):
    """Counts its steps, of which an episode has four, and raises in the sixth."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = in_all = 0
    raises_at = 6

    def _shown(self) -> np.ndarray:
        return np.array([self.steps], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self.steps, self.in_all = self.steps + 1, self.in_all + 1
        if self.in_all == self.raises_at:
            raise ValueError("the sixth step")
        return self._shown(), 1.0, self.steps == 4, False, {}


class Counts(CountsAndRaises):
    """Raises in no step."""

    raises_at = -1


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_episode_with_a_step_that_raised_has_no_gap(mode: AutoresetMode) -> None:
    envs = envhub.make_vec([CountsAndRaises, Counts], autoreset_mode=mode)
    with envhub.minari.record(envs, "counts/raises-v0") as recorder:
        recorder.reset()
        raised = 0
        for _ in range(40):
            try:
                recorder.step(np.zeros(2, int))
            except ValueError:
                raised += 1
    assert raised == 1
    episodes = [episode.observations[:, 0].tolist() for episode in recorder.dataset.iterate_episodes()]
    assert all(episode == list(range(len(episode))) for episode in episodes), episodes
    assert episodes.count([0.0, 1.0, 2.0, 3.0, 4.0]) > 5


def test_a_name_that_exists_is_refused_before_anything_is_played() -> None:
    envs = envhub.make_vec("CartPole-v1", 1)
    envhub.minari.record(envs, "once-v0")
    with pytest.raises(ValueError, match="once-v0 already exists"):
        envhub.minari.record(envs, "once-v0")
    envs.close()


def test_other_vector_envs_are_refused() -> None:
    with pytest.raises(TypeError, match=r"what is recorded is a HubVectorEnv.* not SyncVectorEnv\("):
        envhub.minari.record(gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")]), "other-v0")  # type: ignore[arg-type]


def test_infos_by_env_are_refused() -> None:
    refused = pytest.raises(ValueError, match='these envs have info_mode="by_env"')
    with contextlib.closing(envhub.make_vec("CartPole-v1", 1, num_workers=0, info_mode="by_env")) as envs, refused:
        envhub.minari.record(envs, "by-env-v0")


def test_what_wrappers_show_is_what_is_recorded() -> None:
    from gymnasium.wrappers.vector import TransformObservation

    envs = envhub.make_vec("CartPole-v1", 2, num_workers=1)
    with envhub.minari.record(TransformObservation(envs, lambda batch: batch * 2), "doubled-v0") as recorder:
        first, _ = recorder.reset(seed=1)
        recorder.step(np.ones(2, int))
    plain, _ = gymnasium.make("CartPole-v1").reset(seed=1)
    assert np.array_equal(first[0], plain * 2) and np.array_equal(recorder.dataset[0].observations[0], plain * 2)


def play(recorder: Any) -> None:
    recorder.reset(seed=1)
    for _ in range(3):
        recorder.step(recorder.action_space.sample())


def recovered(dataset_id: str) -> gymnasium.Env[Any, Any]:
    env = minari.load_dataset(dataset_id).recover_environment()
    env.reset(seed=1)
    env.step(env.action_space.sample())
    return env


def test_environment_of_a_private_hub_is_recovered() -> None:
    spec = gymnasium.spec("Pendulum-v1")
    with envhub.minari.record(envhub.make_vec(spec, 2, g=9.0), "ids/spec-v0") as envs:
        play(envs)
    with envhub.minari.record(envhub.make_vec("Pendulum-v1", 2, g=9.0, max_episode_steps=7), "ids/id-v0") as envs:
        play(envs)
    wrapped = functools.partial(lambda: TimeAwareObservation(gymnasium.make("Pendulum-v1", g=9.0)))
    with envhub.minari.record(envhub.make_vec(wrapped, 2), "ids/factory-v0") as envs:
        play(envs)
    assert recovered("ids/spec-v0").unwrapped.g == 9.0
    by_id = recovered("ids/id-v0")
    assert by_id.unwrapped.g == 9.0 and by_id.spec is not None and by_id.spec.max_episode_steps == 7
    assert recovered("ids/factory-v0").observation_space.shape == (4,)


def test_environment_of_a_served_hub_is_recovered(tmp_path: Path) -> None:
    (tmp_path / "far_away.py").write_text(
        "import gymnasium\n"
        "pendulum = 'gymnasium.envs.classic_control:PendulumEnv'\n"
        "gymnasium.register('FarAway-v0', entry_point=pendulum, max_episode_steps=9)\n"
        "def make(g): return gymnasium.envs.classic_control.PendulumEnv(g=g)\n"
    )
    with serve(tmp_path, "CartPole-v1", "far_away:FarAway-v0", "made=far_away:make", cwd=tmp_path) as hub:
        with envhub.minari.record(envhub.make_vec("CartPole-v1", 2, hub=hub.tcp), "known-v0") as envs:
            play(envs)
        with envhub.minari.record(envhub.make_vec("far_away:FarAway-v0", 2, hub=hub.tcp, g=9.0), "far-v0") as envs:
            play(envs)
        with envhub.minari.record(envhub.make_vec("made", 2, hub=hub.tcp, g=8.0), "made-v0") as envs:
            play(envs)
        made = recovered("made-v0")
        assert made.unwrapped.get_wrapper_attr("g") == 8.0
        made.close()
        remote = recovered("far-v0")
        assert isinstance(remote.unwrapped, envhub.HubEnv) and remote.unwrapped.get_wrapper_attr("g") == 9.0
        remote.close()
        # Also by a program that never imports envhub.
        program = "import minari; print(minari.load_dataset('far-v0').recover_environment().reset(seed=1)[0].shape)"
        printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
        assert printed == "(3,)\n"
    assert recovered("known-v0").spec.id == "CartPole-v1"  # here, without the hub


def test_memory_is_bounded_by_the_episodes_under_way() -> None:
    with envhub.minari.record(envhub.make_vec([functools.partial(Parts, 0)], 1), "long-v0") as envs:
        play(envs)
        for _ in range(30):
            envs.step(envs.action_space.sample())
            held = [episode for episode in envs._episodes if episode is not None]
            assert sum(len(episode.rewards) for episode in held) <= 5
            assert envs.dataset.total_episodes == minari.load_dataset("long-v0").total_episodes
    assert envs.dataset.total_episodes == 6


def test_an_env_without_a_spec_is_recorded_and_not_recovered() -> None:
    class Nameless(Parts):
        pass

    with envhub.minari.record(envhub.make_vec(lambda: Nameless(0), 1), "nameless-v0") as envs:
        play(envs)
    with pytest.raises(ValueError, match="env_spec is None"):
        minari.load_dataset("nameless-v0").recover_environment()


class Unrecorded(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Of its arguments nothing is known."""


@pytest.mark.parametrize("what", ["wrapper", "vector", "legacy"])
def test_envs_whose_spec_makes_no_env_are_recorded_and_not_recovered(what: str) -> None:
    if what == "vector":
        envs: Any = envhub.make_vec("CartPole-v1", 2, vector=True)
    else:
        factory = functools.partial(Unrecorded, gymnasium.make("CartPole-v1"))
        envs = envhub.make_vec([factory] * 2, autoreset_mode="SameStep" if what == "legacy" else "NextStep")
    if what == "legacy":
        envs = envhub.legacy_infos(envs)
    with envhub.minari.record(envs, f"{what}-v0") as envs:
        envs.reset(seed=1)
        for _ in range(100):
            envs.step(envs.action_space.sample())
    dataset = minari.load_dataset(f"{what}-v0")
    assert dataset.total_episodes > 2 and dataset.total_steps > 150
    with pytest.raises(ValueError, match="env_spec is None"):
        dataset.recover_environment()
