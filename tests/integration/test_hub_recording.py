"""Recordings by a hub: what a client of any lane saw, bit for bit, on the hub's machine, whatever ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import psutil
import pytest
import recorded_sims
from envhub_server.log import LIMIT_S
from faulty import RAISE
from hubs import ServedHub, kill_worker, lives, serve, stopped, wait_until
from interpreters import FEW, Combination, interpreter
from pages import ROOT, blocks
from same import assert_same
from witness import Witness, about_each, assert_parts_recorded, data_set, play_until_one_crashed

import envhub
from envhub.recording.recorder_handle import share_cpu

MODES = ("NextStep", "SameStep", "Disabled")
PAGE = ROOT / "server/docs/recordings.md"

TABLES = """
[envs.pole]
env = "CartPole-v1"
record = "{name}"

[envs.chosen]
env = "CartPole-v1"
record = {{ folder = "{name}", env_ids = [0, 2, 9], every = 2 }}

[envs.failed]
env = "sims:Counter"
record = {{ folder = "{name}", only = "failed" }}

[envs.filmed]
env = "recorded_sims:parts"
record = {{ folder = "{name}", film = [1] }}

[envs.parts]
env = "recorded_sims:parts"
record = "{name}"

[envs.mute]
env = "recorded_sims:Mute"
record = "{name}"

[envs.dark]
env = "recorded_sims:Dark"
record = {{ folder = "{name}", film = [0] }}

[envs.stuck]
env = "recorded_sims:Stuck"
record = {{ folder = "{name}", film = [0, 1] }}

[envs.graphs]
env = "sims:graphs"
record = "{name}"

[envs.objectives]
env = "large_sims:Objectives"
record = "{name}"

[envs.few]
env = "CartPole-v1"
record = {{ folder = "{name}", episodes_max = 3 }}

[envs.narrow]
env = "sims:Counter"
record = {{ folder = "{name}", queue_bytes = 1 }}

[envs.counted]
env = "sims:Counter"
record = "{name}"

[envs.naughty]
env = "sims:Naughty"
record = "{name}"

[envs.poles]
env = "recorded_sims:poles"
vector = true
record = "{name}"

[envs.batch]
env = "vector_sims:counters"
vector = true
record = "{name}"

[envs.pong]
env = "ale_py:ALE/Pong-v5"
vector = true
record = "{name}"

[envs.batch_filmed]
env = "recorded_sims:filmed"
vector = true
record = {{ folder = "{name}", film = [1, 2] }}

[envs.batch_failing]
env = "vector_sims:failing"
vector = true
record = "{name}"
"""


@contextlib.contextmanager
def recording_hub(folder: Path, *arguments: str) -> Iterator[ServedHub]:
    (folder / "hub.toml").write_text(TABLES.format(name="kept"))
    with serve(folder, "--config", str(folder / "hub.toml"), *arguments) as hub:
        yield hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ServedHub]:
    with recording_hub(tmp_path) as hub:
        yield hub


def told(hub: ServedHub, event: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in hub.log.splitlines() if line.startswith("{"))
    return [line for line in lines if line["event"] == event]


def recorders(pid: int) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if "envhub.recording.process" in " ".join(each.cmdline()):
                found.append(each)
    return found


def workers_of(hub: ServedHub) -> list[int]:
    with envhub.connect(hub.ipc) as client:
        return [pid for session in client.sessions() for pid in session["workers"]]


def written(hub: ServedHub, folder: Path, count: int = 1) -> Any:
    """The data set of the hub's last recording, once it is written, of so many."""
    assert wait_until(lambda: len(told(hub, "recorded")) == count)
    assert wait_until(lambda: not recorders(hub.process.pid))
    assert not [line["why"] for line in told(hub, "recording_ended") if "episodes_max" not in line["why"]]
    found = told(hub, "recorded")[-1]
    assert found["dropped"] == 0 and Path(found["folder"]).parent == folder / "kept"
    assert sorted(path.name for path in Path(found["folder"]).iterdir()) == ["data", "films", "recording.json"]
    made = data_set(folder / "kept", count - 1)
    assert made.total_episodes == found["episodes"]
    return made


def make(hub: ServedHub, name: str, num_envs: int, lane: str = "shared", **options: Any) -> Any:
    address = hub.tcp if lane == "tcp" else hub.ipc
    return envhub.make_vec(name, num_envs, hub=address, lane="auto" if lane != "wire" else "wire", **options)


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mode", "lanes"),
    [
        ("pole", "NextStep", ["shared", "tcp"]),
        pytest.param("pole", "NextStep", ["wire"], marks=pytest.mark.long),
        *(
            pytest.param(
                name,
                mode,
                ["shared", "wire", "tcp"],
                marks=pytest.mark.chaos if mode == MODES[-1] else pytest.mark.long,
            )
            for name in ("pole", "poles")
            for mode in MODES
            if (name, mode) != ("pole", "NextStep")
        ),
    ],
    ids=str,
)
def test_data_read_back_is_what_clients_of_every_lane_saw(
    hub: ServedHub, tmp_path: Path, name: str, mode: str, lanes: list[str]
) -> None:
    for count, lane in enumerate(lanes, 1):
        envs = make(hub, name, 5, lane, num_workers=2, autoreset_mode=mode)
        witness = Witness(envs)
        envs.action_space.seed(count)
        witness.reset([11, 12, 13, 14, 15])
        witness.play(120)
        witness.reset([21, None, 23, None, 25])
        witness.play(40)
        envs.close()
        witness.assert_recorded(written(hub, tmp_path, count))
    about = json.loads((tmp_path / "kept/recording-v0/recording.json").read_text())
    assert (about["env"], about["num_envs"], about["autoreset_mode"]) == (name, 5, mode)
    assert about["kwargs"] == [{}] and about["versions"]["gymnasium"] and about["dropped"] == 0
    if name == "pole":
        assert data_set(tmp_path / "kept").recover_environment().spec.id == "CartPole-v1"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep", marks=pytest.mark.long)])
def test_observations_and_actions_of_parts_are_recorded(hub: ServedHub, tmp_path: Path, mode: str) -> None:
    envs = make(hub, "parts", 3, num_workers=2, autoreset_mode=mode)
    envs.action_space.seed(1)
    envs.reset(seed=[5, 6, 7])
    actions = [envs.action_space.sample() for _ in range(60)]
    for action in actions:
        envs.step(action)
    envs.close()
    assert_parts_recorded(written(hub, tmp_path), [5, 6, 7], actions, mode)


@pytest.mark.long
def test_actions_of_any_form_are_recorded(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "pole", 3, num_workers=2)
    witness = Witness(envs)
    witness.reset([1, 2, 3])
    forms: list[Any] = [[1, 0, 1], np.array([0, 1, 1], np.int8), [np.int64(1), 0, np.uint8(1)], [np.int32(0)] * 3]
    for step in range(60):
        witness.step(forms[step % len(forms)])
    envs.close()
    for episodes in witness.episodes:
        for seen in episodes:
            seen.actions = [np.int64(action) for action in seen.actions]
    witness.assert_recorded(written(hub, tmp_path))


@pytest.mark.long
def test_hub_keeps_nothing_of_recordings_that_are_over(hub: ServedHub, tmp_path: Path) -> None:
    process, counts = psutil.Process(hub.process.pid), []
    for count in range(1, 5):
        envs = make(hub, "pole", 2, num_workers=2)
        envs.reset(seed=1)
        envs.step([0, 1])
        envs.close()
        written(hub, tmp_path, count)
        counts.append(process.num_fds())
    # The connection of the last client may be closed, and its workers be reaped, a moment after its recording is told.
    assert wait_until(lambda: process.num_fds() <= counts[0]), counts
    assert wait_until(lambda: not zombies(process))


def zombies(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for each in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.status() == psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


@pytest.mark.long
@pytest.mark.parametrize("mode", [pytest.param("NextStep", marks=pytest.mark.long), "SameStep"])
def test_native_vector_env_is_recorded_as_seen(hub: ServedHub, tmp_path: Path, mode: str) -> None:
    kwargs = {"max_num_frames_per_episode": 120, "img_height": 20, "img_width": 20}
    envs = make(hub, "pong", 3, num_workers=2, autoreset_mode=mode, env_kwargs=kwargs)
    witness = Witness(envs)
    witness.reset([1, 2, 3])
    witness.play(100)
    envs.close()
    witness.assert_recorded(written(hub, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "some", "others"),
    [("pole", [0, 3], [1, 2]), pytest.param("poles", [0, 2], [1, 3], marks=pytest.mark.long)],
)
def test_parts_of_a_batch_are_recorded(
    hub: ServedHub, tmp_path: Path, name: str, some: list[int], others: list[int]
) -> None:
    envs = make(hub, name, 4, num_workers=2)
    witness = Witness(envs)
    witness.reset([1, 2, 3, 4])
    for step in range(60):
        if step % 4 == 3:  # the rows' results are in several slots by now
            witness.step(np.array([step % 3, 1, 0, 1]) % 2)
            continue
        numbers = some if step % 3 else others
        actions = np.array([step % 2, 1])
        envs.send(actions, numbers)
        *result, order = envs.recv()
        assert order.tolist() == numbers
        witness.saw(numbers, actions, *result)
    envs.close()
    witness.assert_recorded(written(hub, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("lane", ["shared", pytest.param("wire", marks=pytest.mark.long)])
def test_session_that_another_client_takes_over_goes_on_in_the_same_episodes(
    hub: ServedHub, tmp_path: Path, lane: str
) -> None:
    old = make(hub, "pole", 3, lane, num_workers=2)
    witness = Witness(old)
    witness.reset([1, 2, 3])
    witness.play(50)
    with envhub.connect(hub.ipc) as client:
        envs = client.attach(old.token)  # the old one is not asked, so that the workers move to other memory
        witness.envs = envs
        envs.action_space.seed(1)
        witness.play(50)
        envs.close()
    witness.assert_recorded(written(hub, tmp_path))
    with contextlib.suppress(envhub.EnvHubError):
        old.close()


@pytest.mark.long
def test_every_nth_episode_of_chosen_envs_of_those_that_exist(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "chosen", 4, num_workers=2)
    witness = Witness(envs)
    witness.reset([1, 2, 3, 4])
    witness.play(100)
    envs.close()
    witness.episodes = [each[::2] for each in witness.episodes]
    witness.assert_recorded(written(hub, tmp_path), [0, 2])


@pytest.mark.long
def test_film_has_a_frame_of_every_observation(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "filmed", 2, num_workers=1, env_kwargs={"render_mode": "rgb_array", "length": 6})
    envs.reset(seed=1)
    for _ in range(20):
        envs.step(envs.action_space.sample())
    envs.close()
    abouts = about_each(written(hub, tmp_path))
    films = sorted((tmp_path / "kept/recording-v0/films").iterdir())
    filmed = [number for number, about in enumerate(abouts) if about["env_id"] == 1]
    assert [film.name for film in films] == [f"episode-{number:06}.mp4" for number in filmed] and len(films) > 1
    for film, number in zip(films, filmed, strict=True):
        with av.open(str(film)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(frames) == abouts[number]["total_steps"] + 1
        assert [round(frame.mean() / 20) for frame in frames] == [*range(len(frames))]


@pytest.mark.long
def test_vector_env_is_filmed_with_all_of_its_envs(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "batch_filmed", 3, num_workers=1, env_kwargs={"length": 6})
    envs.reset(seed=1)
    for _ in range(20):
        envs.step(envs.action_space.sample())
    assert envs.call("renders") == (envs.call("renders")[1],) * 3  # each frame was asked for once
    envs.close()
    abouts = about_each(written(hub, tmp_path))
    films = sorted((tmp_path / "kept/recording-v0/films").iterdir())
    assert [film.name for film in films] == [f"episode-{a['id']:06}.mp4" for a in abouts if a["env_id"]]
    assert {frames_of(film) for film in films} == {7}


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_envs_are_recorded_and_filmed_on_after_their_worker_has_ended(
    hub: ServedHub, tmp_path: Path, num_workers: int
) -> None:
    kwargs = {"render_mode": "rgb_array", "length": 100}
    envs = make(hub, "filmed", 2, num_workers=num_workers, env_kwargs=kwargs)
    envs.reset(seed=1)
    for _ in range(3):
        play(envs, 12)
        kill_worker(int(envs.call("pid")[1]))
    play(envs, 12)
    envs.close()
    abouts = about_each(written(hub, tmp_path))
    films = sorted(path.name for path in (tmp_path / "kept/recording-v0/films").iterdir())
    assert films == [f"episode-{about['id']:06}.mp4" for about in abouts if about["env_id"] == 1]
    steps: list[list[int]] = [[about["total_steps"] for about in abouts if about["env_id"] == env] for env in (0, 1)]
    assert steps == [[12, 10, 10, 10] if num_workers == 1 else [48], [12, 10, 10, 10]]


@pytest.mark.long
@pytest.mark.parametrize(("hangs_at", "limit"), [(0, "init_timeout=6 s"), (2, "step_timeout=8 s")])
def test_render_that_hangs_ends_as_a_step_that_hangs_and_the_recording_goes_on(
    hub: ServedHub, tmp_path: Path, hangs_at: int, limit: str
) -> None:
    (tmp_path / "there").touch()
    each = [{"hangs_at": hangs_at, "marker": str(tmp_path / name), "length": 6} for name in ("once", "there")]
    kwargs = [{**one, "render_mode": "rgb_array"} for one in each]
    envs = make(hub, "stuck", 2, num_workers=2, env_kwargs=kwargs, init_timeout=6.0, step_timeout=8.0)
    envs.reset(seed=[5, 6])  # which the frames of a film come after
    failures = []
    for _ in range(20):
        infos = envs.step(envs.action_space.sample())[-1]
        failures += [failure for failure in infos.get("env_failure", ()) if failure]
    envs.close()
    assert [failure.cause for failure in failures] == ["timeout"] and limit in failures[0].message
    found = written(hub, tmp_path)
    abouts = about_each(found)
    films = sorted((tmp_path / "kept/recording-v0/films").iterdir())
    assert [film.name for film in films] == [f"episode-{about['id']:06}.mp4" for about in abouts]
    assert [frames_of(film) for film in films] == [about["total_steps"] + 1 for about in abouts]
    first, *others = [about for about in abouts if about["env_id"] == 0]
    if hangs_at:
        assert (first["seed"], first["ended"], first["total_steps"]) == (5, "failed", 1) and limit in first["failure"]
        first = others[0]
    assert first["seed"] not in (None, 5) and (first["ended"], first["total_steps"]) == ("truncated", 6)


def frames_of(film: Path) -> int:
    with av.open(str(film)) as container:
        return len([*container.decode(video=0)])


@pytest.mark.long
def test_env_that_does_not_render_cannot_be_filmed_and_the_client_is_told(hub: ServedHub, tmp_path: Path) -> None:
    with pytest.raises(envhub.RequestRefused, match='has this env filmed, which needs render_mode="rgb_array"'):
        make(hub, "filmed", 2)
    assert wait_until(lambda: not recorders(hub.process.pid))
    assert not (tmp_path / "kept").exists()


@pytest.mark.long
def test_session_without_an_episode_leaves_no_folder(hub: ServedHub, tmp_path: Path) -> None:
    make(hub, "counted", 2).close()
    with contextlib.closing(make(hub, "counted", 2)) as envs:
        envs.reset(seed=1)
    assert wait_until(lambda: len(told(hub, "not_recorded")) == 2)
    assert {line["why"] for line in told(hub, "not_recorded")} == {"no episode was to be recorded"}
    assert wait_until(lambda: not recorders(hub.process.pid)) and not [*tmp_path.glob("kept/*")]
    assert not told(hub, "recording_ended") and not told(hub, "recorded")
    with contextlib.closing(make(hub, "counted", 2)) as envs:
        envs.reset(seed=1)
        envs.step(envs.action_space.sample())
    assert written(hub, tmp_path).total_episodes == 2


@pytest.mark.long
def test_session_goes_on_unrecorded_where_a_space_cannot_be_recorded(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "graphs", 2)
    envs.reset(seed=1)
    envs.step(envs.action_space.sample())
    envs.close()
    (line,) = told(hub, "not_recorded")
    assert line["why"] == "a space has parts that are no arrays of a fixed size" and line["level"] == "warning"
    assert wait_until(lambda: not recorders(hub.process.pid)) and not (tmp_path / "kept").exists()


@pytest.mark.long
def test_rewards_with_axes_are_not_recorded_and_their_env_goes_on(hub: ServedHub, tmp_path: Path) -> None:
    with contextlib.closing(make(hub, "objectives", 2)) as envs:
        envs.reset(seed=1)
        for count in (1.0, 2.0):
            assert envs.step(np.zeros(2, np.int64))[1].tolist() == [[count, count + 0.25]] * 2
    assert "rewards of shape (2,): in a recording a reward is one number" in hub.log
    assert wait_until(lambda: not recorders(hub.process.pid)) and not [*tmp_path.glob("kept/*/data/*/*.arrow")]


@pytest.mark.long
def test_recordings_of_the_page(tmp_path: Path) -> None:
    (text,) = blocks("toml", [PAGE])
    (tmp_path / "hub.toml").write_text(text)
    with serve(tmp_path, "--config", str(tmp_path / "hub.toml")) as hub:
        for name in ("pole", "arm", "quiet"):
            envs = make(hub, name, 3)
            envs.reset(seed=1)
            for _ in range(210):
                envs.step(envs.action_space.sample())
            envs.close()
        assert wait_until(lambda: len(told(hub, "recorded")) == 2)
        folders = {line["folder"] for line in told(hub, "recorded")}
        assert folders == {str(tmp_path / "episodes/recording-v0"), str(tmp_path / "arms/recording-v0")}
        assert {about["env_id"] for about in about_each(data_set(tmp_path / "arms"))} == {0, 1}
        assert data_set(tmp_path / "arms").total_episodes == 2  # the first of each env


@pytest.mark.long
@pytest.mark.parametrize(
    "combination",
    [pytest.param(each, id=each.name, marks=() if each is FEW[0] else pytest.mark.chaos) for each in FEW],
)
def test_envs_of_other_interpreters_are_recorded(
    request: pytest.FixtureRequest, tmp_path: Path, combination: Combination
) -> None:
    python = interpreter(request.config, combination)
    table = f'[envs.old]\nenv = "CartPole-v1"\npython = "{python}"\nrecord = "kept"\n'
    (tmp_path / "hub.toml").write_text(table)
    with serve(tmp_path, "--config", str(tmp_path / "hub.toml")) as hub:
        for count, mode in enumerate(["NextStep", "SameStep"], 1):
            envs = make(hub, "old", 3, num_workers=2, autoreset_mode=mode)
            witness = Witness(envs)
            witness.reset([1, 2, 3])
            witness.play(100)
            envs.close()
            witness.assert_recorded(written(hub, tmp_path, count))
        about = json.loads((tmp_path / "kept/recording-v0/recording.json").read_text())
        assert about["versions"]["python"].startswith(combination.python)


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_only_the_episodes_in_which_an_env_failed(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "failed", 2, num_workers=2, env_kwargs={"length": 5})
    play_until_one_crashed(envs)
    (about,) = about_each(found := written(hub, tmp_path))
    assert (about["env_id"], about["ended"]) == (1, "failed")
    assert "SIGKILL" in about["failure"]
    assert found[0].rewards.tolist() == [2, 2] and found[0].actions.tolist() == [2, 2]
    assert found[0].truncations.tolist() == [False, True]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep", marks=pytest.mark.long)])
@pytest.mark.parametrize("spares", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["counted", pytest.param("batch", marks=pytest.mark.long)])
def test_killed_workers_complete_steps_are_all_there(
    hub: ServedHub, tmp_path: Path, name: str, mode: str, spares: int
) -> None:
    envs = make(hub, name, 3, num_workers=2, env_kwargs={"length": 11}, autoreset_mode=mode, spares=spares)
    witness = Witness(envs)
    witness.reset([1, 2, 3])
    for step in range(1, 60):
        if step % 20 == 5:  # in the middle of an episode
            kill_worker(int(envs.call("pid")[step % 2]))
        witness.step(np.full(3, step))
    envs.close()
    found = written(hub, tmp_path)
    witness.assert_recorded(found)
    failures = [about["failure"] for about in about_each(found) if about["ended"] == "failed"]
    assert failures and all("SIGKILL" in failure for failure in failures)


@pytest.mark.long
def test_env_that_hangs_or_exits_fails_with_what_is_known(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "naughty", 2, num_workers=2, step_timeout=5.0, on_crash="truncate")
    envs.reset(seed=1)
    envs.step([0, 0])
    envs.step([8, 5])  # one sleeps for ever, and the other exits
    envs.close()
    found = {about["env_id"]: about for about in about_each(written(hub, tmp_path)) if about["ended"] == "failed"}
    assert found[0]["total_steps"] == found[1]["total_steps"] == 1
    assert (found[0]["seed"], found[1]["seed"]) == (1, 2)  # which the killed process had noted
    assert "step_timeout=5 s" in found[0]["failure"] and "exited with status 3" in found[1]["failure"]


@pytest.mark.long
@pytest.mark.parametrize("policy", [pytest.param("raise", marks=pytest.mark.long), "truncate"])
def test_episode_in_which_an_env_raised_ends_as_failed(hub: ServedHub, tmp_path: Path, policy: str) -> None:
    envs = make(hub, "naughty", 3, num_workers=1, on_exception=policy)
    envs.reset(seed=1)
    for _ in range(3):
        envs.step([0, 0, 0])
    with pytest.raises(ValueError, match="not allowed") if policy == "raise" else contextlib.nullcontext():
        envs.step([0, 1, 0])
    envs.reset(seed=2)
    envs.step([0, 0, 0])
    envs.close()
    abouts = about_each(written(hub, tmp_path))
    found = sorted((about["env_id"], about["ended"], about["total_steps"]) for about in abouts)
    failed = (1, "failed", 3 if policy == "raise" else 4)
    assert found == [(0, "cut", 1), (0, "cut", 4), (1, "cut", 1), failed, (2, "cut", 1), (2, "cut", 4)]


@pytest.mark.long
@pytest.mark.parametrize("policy", [pytest.param("raise", marks=pytest.mark.long), "truncate"])
def test_episodes_of_a_vector_env_that_raised_end_as_failed(hub: ServedHub, tmp_path: Path, policy: str) -> None:
    envs = make(hub, "batch_failing", 3, num_workers=1, on_exception=policy)
    envs.reset(seed=1)
    for _ in range(3):
        envs.step([0, 0, 0])
    with pytest.raises(KeyError, match="no such joint") if policy == "raise" else contextlib.nullcontext():
        envs.step([0, RAISE, 0])
    envs.reset(seed=2)
    envs.step([0, 0, 0])
    envs.close()
    abouts = about_each(written(hub, tmp_path))
    found = sorted((about["env_id"], about["total_steps"], about["ended"]) for about in abouts)
    seen = 3 if policy == "raise" else 4
    assert found == [(env, *each) for env in range(3) for each in [(1, "cut"), (seen, "failed")]]


@pytest.mark.long
def test_exception_that_cannot_be_shown_costs_no_worker(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "mute", 2, num_workers=1, on_exception="raise")
    envs.reset(seed=1)
    envs.step(envs.action_space.sample())
    with pytest.raises(Exception, match="it broke"):
        envs.step(envs.action_space.sample())
    assert envs.call("at") == (1, 1)
    envs.close()
    failed = [about for about in about_each(written(hub, tmp_path)) if about["ended"] == "failed"]
    assert len(failed) == 2 and all(about["failure"].endswith("Unreadable: it broke") for about in failed)


@pytest.mark.long
@pytest.mark.parametrize("mode", [pytest.param("NextStep", marks=pytest.mark.long), "SameStep"])
def test_recycled_workers_lose_no_step(hub: ServedHub, tmp_path: Path, mode: str) -> None:
    envs = make(hub, "pole", 2, num_workers=2, recycle={"episodes": 3}, autoreset_mode=mode)
    witness = Witness(envs)
    witness.reset([1, 2])
    assert wait_until(lambda: witness.play(20) or hub.log.count("worker_recycled") >= 4)
    envs.close()
    found = written(hub, tmp_path)
    assert "failed" not in {about["ended"] for about in about_each(found)}
    witness.assert_recorded(found)


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", ["NextStep", *(pytest.param(mode, marks=pytest.mark.chaos) for mode in ("SameStep", "Disabled"))]
)
@pytest.mark.parametrize(
    "cause", ["killed", *(pytest.param(cause, marks=pytest.mark.long) for cause in ("raised", "recycled"))]
)
def test_episode_of_an_env_that_the_hub_made_anew_can_be_repeated_by_its_seed(
    hub: ServedHub, tmp_path: Path, cause: str, mode: str
) -> None:
    raising = {"on_exception": "truncate", "restarts_max": 1000}
    options: dict[str, Any] = {"recycle": {"episodes": 2}} if cause == "recycled" else raising
    kwargs = {"render_mode": "rgb_array", "raises_at": 4 if cause == "raised" else -1}
    envs = make(hub, "filmed", 2, num_workers=2, env_kwargs=kwargs, autoreset_mode=mode, **options)
    envs.reset(seed=[5, 6])
    for _ in range(4):
        if cause == "killed":
            kill_worker(int(envs.call("pid")[1]))  # in its first step, before a block of the tape is full
        play(envs, 3)
    assert cause != "recycled" or wait_until(lambda: play(envs, 20) or "worker_recycled" in hub.log)
    play(envs, 20)
    envs.close()
    found = written(hub, tmp_path)
    made_anew = [about for about in about_each(found) if about.get("seed") not in (None, 5, 6)]
    assert len({about["seed"] for about in made_anew}) == len(made_anew) >= (1 if cause == "recycled" else 4)
    for about in made_anew:
        assert_repeated(found[about["id"]], about["seed"], without_last=about["ended"] == "failed")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", *(pytest.param(mode, marks=pytest.mark.long) for mode in MODES[1:])])
def test_envs_that_a_masked_reset_leaves_out_begin_by_the_seeds_that_are_recorded(
    hub: ServedHub, tmp_path: Path, mode: str
) -> None:
    envs = make(hub, "poles", 3, num_workers=1, autoreset_mode=mode)
    envs.reset(seed=[5, 6, 7])
    play(envs, 2)
    (pid,) = workers_of(hub)
    kill_worker(pid)
    envs.step(np.array([0, 1, 1]))
    envs.reset(options={"reset_mask": np.array([True, False, False])})
    for _ in range(3):
        envs.step(np.array([0, 1, 1]))
        if mode == "Disabled":
            envs.reset(options={"reset_mask": np.array([False, True, True])})
            mode = ""
    envs.close()
    found = written(hub, tmp_path)
    made_anew = [about for about in about_each(found) if about.get("seed") not in (None, 5, 6, 7)]
    assert {about["env_id"] for about in made_anew} == {0, 1, 2}
    for about in made_anew:
        first, _ = gymnasium.make("CartPole-v1").reset(seed=about["seed"])
        assert_same(found[about["id"]].observations[0], first, "first observation")


def assert_repeated(episode: Any, seed: int, without_last: bool) -> None:
    """The env shows the same again when it is reset by this seed; a failed one has not shown its last observation."""
    env = recorded_sims.Parts()
    shown = [env.reset(seed=seed)[0]]
    for at in range(len(episode.rewards) - without_last):
        shown.append(env.step([part[at] for part in episode.actions])[0])
    for key, column in episode.observations.items():
        assert_same(column[: len(shown)], np.array([each[key] for each in shown]), key)


def play(envs: Any, steps: int) -> None:
    for _ in range(steps):
        _, _, terminations, truncations, _ = envs.step(envs.action_space.sample())
        if (ended := terminations | truncations).any() and envs.autoreset_mode.value == "Disabled":
            envs.reset(options={"reset_mask": ended})


@pytest.mark.long
def test_every_nth_episode_of_recycled_workers(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "chosen", 1, recycle={"episodes": 1}, autoreset_mode="SameStep")
    witness = Witness(envs)
    witness.reset([1])
    assert wait_until(lambda: witness.play(20) or hub.log.count("worker_recycled") >= 3)
    envs.close()
    witness.episodes = [each[::2] for each in witness.episodes]
    witness.assert_recorded(written(hub, tmp_path))


# --- whatever ends ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_killed_hubs_episodes_are_all_there(tmp_path: Path) -> None:
    with recording_hub(tmp_path) as hub:
        envs = make(hub, "pole", 3, num_workers=2, on_hub_loss="raise")
        witness = Witness(envs)
        witness.reset([1, 2, 3])
        witness.play(150)
        envs.call("get_wrapper_attr", "spec")  # workers answer a step before they record it, and a call after that
        (recorder,) = recorders(hub.process.pid)
        hub.stop(signal.SIGKILL)
        folder = tmp_path / "kept/recording-v0"
        assert wait_until(lambda: not (folder / ".unfinished").exists())
        witness.assert_recorded(data_set(tmp_path / "kept"))
        assert wait_until(lambda: not lives(recorder))
        with contextlib.suppress(envhub.EnvHubError):
            envs.close(terminate=True)


@pytest.mark.long
def test_hub_that_is_stopped_has_everything_written_first(tmp_path: Path) -> None:
    with recording_hub(tmp_path) as hub:
        envs = make(hub, "pole", 3, num_workers=2, on_hub_loss="raise")
        witness = Witness(envs)
        witness.reset([1, 2, 3])
        witness.play(80)
        processes = recorders(hub.process.pid)
        hub.stop()
        assert not any(each.is_running() for each in processes)
        witness.assert_recorded(written_by_log(hub, tmp_path))
        with contextlib.suppress(envhub.EnvHubError):
            envs.close(terminate=True)


@pytest.mark.long
def test_hub_that_is_told_so_while_it_waits_for_recordings_ends(tmp_path: Path) -> None:
    with recording_hub(tmp_path) as hub:
        envs = make(hub, "pole", 2, on_hub_loss="raise")
        envs.reset(seed=1)
        (recorder,) = recorders(hub.process.pid)
        recorder.suspend()
        envs.close()
        hub.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: bool(told(hub, "stopping")))
        assert not wait_until(lambda: hub.process.poll() is not None, 3)
        hub.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: hub.process.poll() is not None, 12)
        with contextlib.suppress(psutil.Error):  # the hub has ended it
            recorder.resume()


def written_by_log(hub: ServedHub, folder: Path) -> Any:
    assert [line["dropped"] for line in told(hub, "recorded")] == [0]
    return data_set(folder / "kept")


@pytest.mark.long
def test_session_goes_on_when_the_process_that_records_is_killed(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "pole", 2, num_workers=2)
    envs.reset(seed=1)
    (recorder,) = recorders(hub.process.pid)
    recorder.kill()
    assert wait_until(lambda: len(told(hub, "recording_ended")) == 1)
    for _ in range(30):
        envs.step([0, 1])
    envs.close()
    (ended,) = told(hub, "recording_ended")
    assert ended["why"] == "its process has ended" and Path(ended["folder"]).name == "recording-v0"
    assert json.loads((Path(ended["folder"]) / "recording.json").read_text())["ended"] == ended["why"]
    assert json.loads((Path(ended["folder"]) / "recording.json").read_text())["ended"] == "its process has ended"
    assert not told(hub, "worker_exited") or all(line["level"] == "info" for line in told(hub, "worker_exited"))


@pytest.mark.long
def test_envs_of_a_worker_that_tells_nonsense_are_recorded_no_more_and_the_log_says_so(
    hub: ServedHub, tmp_path: Path
) -> None:
    envs = make(hub, "parts", 3, num_workers=2)
    envs.reset(seed=1)
    play(envs, 10)
    for _ in range(2):
        envs.call("meddle")
        play(envs, 10)
        for pid in {*envs.call("pid")}:
            kill_worker(int(pid))
        play(envs, 10)
    envs.close()
    written(hub, tmp_path)
    lines = told(hub, "env_not_recorded")
    told_s = [datetime.fromisoformat(line["timestamp"].removesuffix("Z")).timestamp() for line in lines]
    told_of = [(line["env"], line["num_envs"]) for line in lines]
    assert {*told_of} == {(0, 2), (1, 1)}
    # The second time is a repeat, which is told only where it comes late, as on a busy machine.
    soon = [each for each, at_s in zip(told_of, told_s, strict=True) if at_s < told_s[0] + LIMIT_S - 0.5]
    assert len(soon) == len({*soon})
    assert {line["session"] for line in lines} == {told(hub, "recorded")[0]["session"]}
    assert all("is refused" in line["why"] and line["level"] == "warning" for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("shown", [None, pytest.param([[0, 0], [0, 0]], marks=pytest.mark.long)])
def test_envs_are_recorded_without_films_where_one_shows_no_frames(hub: ServedHub, tmp_path: Path, shown: Any) -> None:
    envs = make(hub, "dark", 2, num_workers=1, env_kwargs={"shown": shown})
    envs.reset(seed=1)
    for _ in range(5):
        assert not envs.step([1, 1])[3].any()
    envs.close()
    assert [about["total_steps"] for about in about_each(written(hub, tmp_path))] == [5, 5]
    assert not [*(tmp_path / "kept/recording-v0/films").iterdir()]
    assert "nothing is filmed" in hub.log and not told(hub, "env_suspicious")


@pytest.mark.long
def test_session_goes_on_when_the_disk_takes_no_more(hub: ServedHub, tmp_path: Path) -> None:
    with contextlib.closing(make(hub, "pole", 2, num_workers=2)) as envs:
        envs.reset(seed=1)
        (recorder,) = recorders(hub.process.pid)
        recorder.rlimit(psutil.RLIMIT_FSIZE, (64, 64))  # as on a full disk, a write fails
        share_cpu(recorder.pid)  # on a busy machine it has no CPU else
        assert wait_until(lambda: bool(envs.step([0, 1])) and bool(told(hub, "recording_ended")))
        assert "OSError" in told(hub, "recording_ended")[0]["why"]
        assert not (tmp_path / "kept/recording-v0/.unfinished").exists()
        assert envs.step([0, 1])[0].shape == (2, 4)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_recording_ends_at_its_limit_of_episodes(hub: ServedHub, tmp_path: Path) -> None:
    envs = make(hub, "few", 4, num_workers=2)
    Witness(envs).envs.reset(seed=1)
    for _ in range(100):
        envs.step(envs.action_space.sample())
    envs.close()
    assert written(hub, tmp_path).total_episodes == 3
    assert [line["why"] for line in told(hub, "recording_ended")] == ["episodes_max=3 is reached"]


@pytest.mark.long
def test_session_whose_recording_has_no_memory_goes_on_unrecorded(tmp_path: Path) -> None:
    with recording_hub(tmp_path, "--recordings-memory-max", str(3 << 29)) as hub:  # bytes, of which each takes 1 << 30
        envs = make(hub, "pole", 2)
        make(hub, "pole", 2).close()
        (line,) = told(hub, "not_recorded")
        assert line["why"].startswith("1073741824 of recordings_memory_max=1610612736 bytes are in use")
        make(hub, "narrow", 2).close()
        envs.close()

        def another_is_recorded() -> bool:
            before = len(told(hub, "not_recorded"))
            make(hub, "pole", 2).close()
            return len(told(hub, "not_recorded")) == before

        assert wait_until(another_is_recorded)


@pytest.mark.long
def test_what_cannot_be_kept_up_with_is_dropped_in_whole_episodes_and_counted(hub: ServedHub, tmp_path: Path) -> None:
    """The queue of each worker has room for eight steps, and an episode has 40."""
    envs = make(hub, "narrow", 4, num_workers=2, env_kwargs={"length": 40}, autoreset_mode="SameStep")
    envs.reset()
    (recorder,) = recorders(hub.process.pid)
    with stopped(recorder.pid):
        for step in range(400):
            envs.step([step % 1000] * 4)
    envs.close()
    assert wait_until(lambda: bool(told(hub, "recorded")))
    assert told(hub, "recorded")[0]["dropped"] > 0
    for episode in data_set(tmp_path / "kept"):
        assert episode.observations[:, 0].tolist() == [*range(len(episode.rewards) + 1)]
        assert np.diff(episode.rewards).tolist() == [1.0] * (len(episode.rewards) - 1)


# --- what is missing --------------------------------------------------------------------------------------------------

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
import importlib.util

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in ("minari", "PIL") else found(name, package)
"""


@pytest.mark.long
def test_missing_extra_is_told_at_the_start_of_the_hub_and_to_clients(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(WITHOUT)
    (tmp_path / "hub.toml").write_text(f'{TABLES.format(name="kept")}\n[envs.plain]\nenv = "CartPole-v1"\n')
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])
    with serve(tmp_path, "--config", str(tmp_path / "hub.toml"), environ={"PYTHONPATH": path}) as hub:
        assert wait_until(lambda: len(told(hub, "env_unready")) == TABLES.count("record = "))
        why = 'recording needs minari and Pillow: pip install "envhub-rl[record]"'
        assert {line["why"] for line in told(hub, "env_unready")} == {why}
        with pytest.raises(envhub.RequestRefused, match=r"'pole' is not ready: recording needs minari and Pillow"):
            make(hub, "pole", 2)
        make(hub, "plain", 2).close()
