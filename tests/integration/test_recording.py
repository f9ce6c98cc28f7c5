"""Recordings: what the trainer saw, bit for bit, in whole episodes, whatever ends; what is not recorded is counted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import psutil
import pytest
import recorded_sims
import sims
from hubs import HERE, ServedHub, kill_worker, lives, serve, wait_until, worker_processes
from same import assert_same
from witness import Witness, about_each, data_set, play_until_one_crashed

import envhub

NUM_ENVS, STEPS = 3, 60


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), "parts=recorded_sims:parts", "graphs=sims:graphs") as hub:
        yield hub


@pytest.mark.parametrize("lane", ["private", pytest.param("tcp", marks=pytest.mark.long)])
def test_data_read_back_is_what_the_envs_gave(served: ServedHub, tmp_path: Path, lane: str) -> None:
    made: dict[str, Any] = {"env": "parts", "hub": served.tcp} if lane == "tcp" else {"env": recorded_sims.Parts}
    seeds, actions = [5, 6, 7], []
    with contextlib.closing(envhub.make_vec(num_envs=NUM_ENVS, record=tmp_path, **made)) as envs:
        envs.reset(seed=seeds)
        for _ in range(STEPS):
            actions.append(envs.action_space.sample())
            envs.step(actions[-1])
    assert envs.recorded.dropped == 0 and not envs.recorded.ended
    found, folder = data_set(tmp_path), envs.recorded.folder
    env_ids = [about["env_id"] for about in about_each(found)]
    for env, seed in enumerate(seeds):
        episode, own = found[env_ids.index(env)], recorded_sims.Parts()
        steps = [
            (own.reset(seed=seed)[0],),
            *(own.step((at[env], x[env])) for at, x in actions[: len(episode.rewards)]),
        ]
        assert steps[-1][2] or steps[-1][3]
        for key, column in episode.observations.items():
            assert_same(column, np.array([step[0][key] for step in steps]), key)
        for part, column in enumerate(episode.actions):
            assert_same(column, np.array([batch[part][env] for batch in actions[: len(column)]]), f"action {part}")
        for column, name in enumerate(("rewards", "terminations", "truncations"), 1):
            assert getattr(episode, name).tolist() == [step[column] for step in steps[1:]]
    assert sorted(path.name for path in folder.iterdir()) == ["data", "films", "recording.json"]
    about = json.loads((folder / "recording.json").read_text())
    assert about["env"] == ("parts" if lane == "tcp" else "recorded_sims:Parts")
    assert about["versions"]["gymnasium"] == gymnasium.__version__ and about["episodes"] == envs.recorded.episodes


@pytest.mark.long
def test_env_of_a_data_set_can_be_made_again(tmp_path: Path) -> None:
    envs = envhub.make_vec("Pendulum-v1", 2, record=str(tmp_path), env_kwargs={"g": 1.5})
    envs.reset(seed=1)
    envs.step(envs.action_space.sample())
    envs.close()
    assert data_set(tmp_path).recover_environment().unwrapped.g == 1.5
    assert json.loads((envs.recorded.folder / "recording.json").read_text())["kwargs"] == [{"g": 1.5}]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_texts_are_recorded_as_they_are(tmp_path: Path, mode: str) -> None:
    envs: Any = envhub.make_vec(recorded_sims.Talker, 2, record=tmp_path, autoreset_mode=mode)
    envs.reset()
    for _ in range(4):
        envs.step(("ä€", "abcabc"))
    envs.close()
    found = [(each.observations, each.actions) for each in data_set(tmp_path)]
    assert [each["said"] for each, _ in found] == [["a", *["ä€"] * 4], ["a", *["abcabc"] * 4]]
    assert [acted for _, acted in found] == [["ä€"] * 4, ["abcabc"] * 4]
    assert found[0][0]["at"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.parametrize("info_mode", ["batched", "by_env"])
def test_every_nth_episode_of_chosen_envs(tmp_path: Path, info_mode: Any) -> None:
    options = envhub.RecordOptions(tmp_path, env_ids=np.array([0, 2]), every=3)  # type: ignore[arg-type]
    how = {"autoreset_mode": "SameStep", "record": options, "info_mode": info_mode}
    envs: Any = envhub.make_vec(lambda: sims.Counter(length=4), 3, **how)
    envs.reset()
    for step in range(28):
        envs.drop_pending()  # which cuts no episode where nothing is pending
        envs.step([step, 0, 2 * step])
    envs.close()
    found = data_set(tmp_path)
    by_env = {env: [n for n, about in enumerate(about_each(found)) if about["env_id"] == env] for env in range(3)}
    for env, factor in ((0, 1), (2, 2)):
        rewards = [found[number].rewards.tolist() for number in by_env[env]]
        assert rewards == [[factor * (12 * k + step) for step in range(4)] for k in range(3)]
        assert [found[number].observations[:, 0].tolist() for number in by_env[env][:2]] == [[0, 1, 2, 3, 4]] * 2
    assert not by_env[1] and envs.recorded.dropped == 0


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_episodes_are_those_that_a_witness_saw_through_resets_and_crashes(tmp_path: Path, mode: str) -> None:
    record = envhub.RecordOptions(tmp_path, env_ids=[0, 2, 3])
    made: dict[str, Any] = {"autoreset_mode": mode, "record": record, "num_workers": 4}
    envs: Any = envhub.make_vec([partial(sims.Counter, length) for length in (3, 4, 5, 90)], **made)
    envs.action_space.seed(1)
    witness = Witness(envs)
    witness.reset([5, None, 7, 8])
    witness.play(40)
    for _ in range(3):
        kill_worker(int(envs.call("pid")[2]))
        witness.play(30)
        witness.reset([1, 2, 3, 4], mask=np.array([True, False, False, True]))
        witness.play(30)
    envs.close()
    assert envs.recorded.dropped == 0
    witness.assert_recorded(data_set(tmp_path), record.env_ids)


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_only_the_episodes_in_which_an_env_failed(tmp_path: Path) -> None:
    options = envhub.RecordOptions(tmp_path, only="failed")
    with_worker_each = {"num_workers": 2, "record": options}
    envs = envhub.make_vec(lambda: sims.Counter(length=5), 2, **with_worker_each)  # type: ignore[arg-type]
    play_until_one_crashed(envs)
    (about,) = about_each(found := data_set(tmp_path))
    assert (about["env_id"], about["ended"]) == (1, "failed") and about["failure"].startswith("crash: worker 1")
    assert found[0].rewards.tolist() == [2, 2, 0] and found[0].actions.tolist() == [2, 2, 4]
    assert found[0].truncations.tolist() == [False, False, True]


@pytest.mark.long
def test_episode_in_which_an_env_raised_ends_with_its_last_result(tmp_path: Path) -> None:
    factories = [lambda: recorded_sims.Parts(length=50), lambda: recorded_sims.Parts(raises_at=4, length=50)]
    envs = envhub.make_vec(factories, record=tmp_path)
    envs.reset(seed=1)
    for _ in range(3):
        envs.step(envs.action_space.sample())
    with pytest.raises(ValueError, match="it broke"):
        envs.step(envs.action_space.sample())
    envs.reset(seed=2)
    envs.step(envs.action_space.sample())
    envs.close()
    abouts = about_each(data_set(tmp_path))
    told = sorted((about["env_id"], about["ended"], about["total_steps"], about["seed"]) for about in abouts)
    assert told == [(0, "cut", 1, 2), (0, "cut", 3, 1), (1, "cut", 1, 3), (1, "failed", 3, 2)]
    (failure,) = (about["failure"] for about in abouts if about["ended"] == "failed")
    assert failure == "exception: ValueError('it broke')"


@pytest.mark.long
@pytest.mark.parametrize("begins", ["begin_step", "begin_reset"])
def test_request_that_is_interrupted_once_it_is_sent_ends_the_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    with contextlib.closing(envhub.make_vec(partial(sims.Counter, 4), 1, record=tmp_path)) as envs:
        envs.reset()
        envs.step([1])
        lane = envs._session.lane
        real = getattr(lane, begins)

        def interrupted(*arguments: Any) -> None:
            real(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(lane, begins, interrupted)
            envs.reset() if begins == "begin_reset" else envs.step([2])
        while not envs.step([3])[2][0]:
            pass
        envs.step([4])
        envs.step([5])
    first, second = data_set(tmp_path).iterate_episodes()
    assert (first.actions.tolist(), first.observations[:, 0].tolist()) == ([1], [0, 1])
    assert (second.actions.tolist(), second.observations[:, 0].tolist()) == ([5], [0, 1])


# --- whatever ends ----------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
import envhub, sims

envs = envhub.make_vec(lambda: sims.Counter(length=5), 2, record=sys.argv[1], autoreset_mode="SameStep")
envs.reset()
for step in range(13):
    envs.step([step, step])
if sys.argv[2] == "killed":
    while not envs.recorded.episodes:
        time.sleep(1.1)  # after a second the steps are handed over
        envs.step([0, 0])
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[2] == "raises":
    raise SystemExit(3)
"""


def play_and_end(folder: Path, how: str) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(folder), how], cwd=HERE, timeout=60)
    assert ran.returncode == {"killed": -signal.SIGKILL, "raises": 3, "ends": 0}[how]
    about = folder / "recording-v0/recording.json"
    assert wait_until(lambda: bool(json.loads(about.read_text())["closed"]))
    assert not (folder / "recording-v0/.unfinished").exists()
    found: dict[str, Any] = json.loads(about.read_text())
    return found


@pytest.mark.long
def test_killed_program_loses_the_episodes_under_way_and_no_others(tmp_path: Path) -> None:
    about = play_and_end(tmp_path, "killed")
    assert about["episodes"] >= 4 and about["dropped"] == 2
    assert about["ended"] == "the program ended without closing it"
    for episode in data_set(tmp_path):
        assert episode.observations[:, 0].tolist() == [*range(6)]


@pytest.mark.long
@pytest.mark.parametrize("how", ["ends", "raises"])
def test_program_that_ends_without_a_close_has_all_episodes_written(tmp_path: Path, how: str) -> None:
    about = play_and_end(tmp_path, how)
    assert (about["episodes"], about["dropped"], about["ended"]) == (6, 0, "")
    found = data_set(tmp_path)
    assert found.total_steps == 26 and [each["ended"] for each in about_each(found)].count("cut") == 2


def recorder_of(envs: Any) -> psutil.Process:
    (found,) = (
        process
        for process in psutil.Process().children()
        if lives(process) and "envhub_client.recording.process" in " ".join(process.cmdline())
    )
    return found


KILLED_AFTER_WRITING = """
import os, signal, sys

if "envhub_client.recording.process" in " ".join(sys.orig_argv):
    from envhub_client.recording.process import RecordingFolder

    add = RecordingFolder.add

    def add_and_die(self, episode):
        add(self, episode)
        os.kill(os.getpid(), signal.SIGKILL)

    RecordingFolder.add = add_and_die
"""


@pytest.mark.long
def test_program_goes_on_when_the_process_that_records_is_killed_before_it_could_tell_of_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILLED_AFTER_WRITING)
    monkeypatch.syspath_prepend(tmp_path)
    options = envhub.RecordOptions(tmp_path, film=[0])
    envs = envhub.make_vec("CartPole-v1", 2, record=options, render_mode="rgb_array")
    envs.reset()
    recorder = recorder_of(envs)
    assert wait_until(lambda: bool(envs.step([1, 1]) and envs.recorded.ended))
    assert [message for message in caplog.messages if "nothing more is recorded" in message]
    for _ in range(30):
        assert envs.step([1, 1])[0].shape == (2, 4)
    envs.reset()
    envs.close()
    assert not recorder.is_running()
    found, folder = data_set(tmp_path), envs.recorded.folder
    assert envs.recorded.episodes == found.total_episodes > 0
    written = [*folder.glob("data/*/*"), *folder.glob("films/*")]
    assert envs.recorded.nbytes == sum(path.stat().st_size for path in written)
    about = json.loads((folder / "recording.json").read_text())
    assert (about["episodes"], about["ended"]) == (envs.recorded.episodes, envs.recorded.ended)


@pytest.mark.long
def test_program_is_told_what_was_recorded_before_the_disk_took_no_more(tmp_path: Path) -> None:
    with contextlib.closing(envhub.make_vec(lambda: sims.Counter(length=5), 2, record=tmp_path)) as envs:
        envs.reset()
        assert wait_until(lambda: bool(envs.step([1, 1]) and envs.recorded.episodes))
        recorder_of(envs).rlimit(psutil.RLIMIT_FSIZE, (64, 64))  # as on a full disk, a write fails
        assert wait_until(lambda: bool(envs.step([1, 1]) and envs.recorded.ended))
        assert "OSError" in envs.recorded.ended and envs.recorded.dropped
        found = data_set(tmp_path).total_episodes
        assert found == envs.recorded.episodes > 0
        assert not (envs.recorded.folder / ".unfinished").exists()


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_nothing_is_recorded_into_a_folder_that_is_full(tmp_path: Path) -> None:
    (tmp_path / "recording-v3/data").mkdir(parents=True)
    with (tmp_path / "recording-v3/data/main_data.hdf5").open("wb") as file:
        file.truncate(1 << 20)
    options = envhub.RecordOptions(tmp_path, folder_bytes_max=1 << 20)
    with contextlib.closing(envhub.make_vec(lambda: sims.Counter(length=2), 2, record=options)) as envs:
        envs.reset()
        for _ in range(20):
            envs.step([1, 1])
    assert (envs.recorded.episodes, envs.recorded.ended) == (0, "folder_bytes_max=1048576 is reached")


@pytest.mark.long
def test_recording_ends_at_its_limit_of_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit, episode_bytes = 200_000, 9 * 1100  # of at most so many observations and actions
    options = envhub.RecordOptions(tmp_path, bytes_max=limit)
    envs = envhub.make_vec(recorded_sims.Parts, 2, record=options, autoreset_mode="SameStep")
    envs.reset(seed=1)
    while not envs.recorded.ended:
        for _ in range(50):
            envs.step(envs.action_space.sample())
    at_limit = envs.recorded.episodes
    for _ in range(50):  # which are not recorded any more, and harm nothing
        envs.step(envs.action_space.sample())
    envs.close()
    recorded = envs.recorded
    assert recorded.ended == f"bytes_max={limit} is reached" and recorded.ended in caplog.text
    assert data_set(tmp_path).total_episodes == recorded.episodes == at_limit
    assert limit <= recorded.nbytes < limit + episode_bytes
    for episode, about in zip(data_set(tmp_path), about_each(data_set(tmp_path)), strict=True):
        assert len(episode.observations["at"]) == about["total_steps"] + 1 and about["ended"] != "cut"


@pytest.mark.long
def test_what_cannot_be_kept_up_with_is_dropped_in_whole_episodes_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue has room for eight steps, and an episode has 40."""
    options = envhub.RecordOptions(tmp_path, queue_bytes=1)
    envs = envhub.make_vec(lambda: sims.Counter(length=40), 4, record=options, autoreset_mode="SameStep")
    envs.reset()
    with caplog.at_level(logging.INFO, "envhub"):
        for step in range(400):
            envs.step([step % 1000] * 4)
        envs.close()
    recorded = envs.recorded
    assert recorded.dropped > 0 and f"{recorded.dropped} were dropped" in caplog.text
    for episode in data_set(tmp_path) if recorded.episodes else ():
        assert episode.observations[:, 0].tolist() == [*range(len(episode.rewards) + 1)]
        assert np.diff(episode.rewards).tolist() == [1.0] * (len(episode.rewards) - 1)


@pytest.mark.long
def test_process_that_gets_no_cpu_drops_nothing_while_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envhub_client.recording.observer.HANDED_OVER_S", 0.0)
    with contextlib.closing(envhub.make_vec(lambda: sims.Counter(length=5), 1, record=tmp_path)) as envs:
        envs.reset()
        recorder = recorder_of(envs)
        recorder.suspend()
        for _ in range(60):
            envs.step([1])
        recorder.resume()
    assert envs.recorded.dropped == 0 and data_set(tmp_path).total_steps == 50


# --- films ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_film_has_a_frame_of_every_observation(tmp_path: Path, mode: str) -> None:
    options = envhub.RecordOptions(tmp_path, film=[1], every=2)
    made = {"render_mode": "rgb_array", "length": 6}
    envs = envhub.make_vec(lambda: recorded_sims.Parts(**made), 2, record=options, autoreset_mode=mode)  # type: ignore[arg-type]
    envs.reset(seed=1)
    for _ in range(30):
        envs.step(envs.action_space.sample())
    envs.close()
    abouts = about_each(data_set(tmp_path))
    filmed = [number for number, about in enumerate(abouts) if about["env_id"] == 1]
    films = sorted((envs.recorded.folder / "films").iterdir())
    assert [film.name for film in films] == [f"episode-{number:06}.mp4" for number in filmed] and len(films) > 1
    for film, number in zip(films, filmed, strict=True):
        with av.open(str(film)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        # After the last step of an episode, with SAME_STEP the env shows its next one.
        ended = abouts[number]["ended"] != "cut"
        assert len(frames) == abouts[number]["total_steps"] + (mode == "NextStep" or not ended)
        assert frames[0].shape == (32, 40, 3)
        assert [round(frame.mean() / 20) for frame in frames] == [*range(len(frames))]


def test_films_need_envs_that_render(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='films need render_mode="rgb_array"'):
        envhub.make_vec(sims.Counter, 2, record=envhub.RecordOptions(tmp_path, film=[0]))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"env_ids": [3]}, "env_ids must be numbers from 0 to 1"),
        ({"env_ids": [0], "film": [1]}, r"not recorded: \[1\]"),
        ({"every": 0}, "every must be at least 1"),
        ({"only": "some"}, "only must be"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        made = {"render_mode": "rgb_array"}
        record = envhub.RecordOptions(tmp_path, **wrong)
        envhub.make_vec(lambda: sims.Counter(**made), 2, record=record)  # type: ignore[arg-type]


def test_parts_of_a_batch_are_refused(tmp_path: Path) -> None:
    envs = envhub.make_vec(sims.Counter, 2, record=tmp_path)
    with pytest.raises(ValueError, match="parts of a batch are not recorded"):
        envs.async_reset()
    envs.close()
    assert not os.listdir(tmp_path)  # for nothing was played


def test_space_that_minari_lacks_is_refused(served: ServedHub, tmp_path: Path) -> None:
    before = len(worker_processes(served.process.pid))
    with pytest.raises(envhub.UnsupportedSpace, match="cannot be recorded: Minari stores"):
        envhub.make_vec("graphs", 2, hub=served.tcp, record=tmp_path)
    # One that lists what the hub offers may have ended, too.
    assert wait_until(lambda: len(worker_processes(served.process.pid)) <= before)
    assert not os.listdir(tmp_path)
