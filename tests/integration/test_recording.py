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
from pathlib import Path
from typing import Any

import av
import gymnasium
import minari
import numpy as np
import psutil
import pytest
import recorded_sims
import sims
from hubs import ServedHub, kill_worker, serve, wait_until, worker_processes
from same import assert_same

import envhub

NUM_ENVS, STEPS = 3, 60


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), "parts=recorded_sims:parts", "graphs=sims:graphs") as hub:
        yield hub


def data_set(folder: Path, number: int = 0) -> Any:
    return minari.MinariDataset(folder / f"recording-v{number}" / "data")


def about_each(found: Any) -> list[dict[str, Any]]:
    return list(found.storage.get_episode_metadata(range(found.total_episodes)))


def own_episodes(seed: int, actions: list[Any], mode: str) -> list[Any]:
    """What one env gives when it is stepped as in a vector env, as (observations, actions, rewards, flags)."""
    env = recorded_sims.Parts()
    episodes: list[Any] = []

    def begin(**kwargs: Any) -> None:
        episodes.append(([env.reset(**kwargs)[0]], [], [], [], []))

    begin(seed=seed)
    ended = False
    for action in actions:
        if ended:
            begin()
            ended = False
            continue
        for column, value in zip(episodes[-1], (None, action), strict=False):
            if value is not None:
                column.append(value)
        observation, reward, terminated, truncated, _ = env.step(action)
        episodes[-1][0].append(observation)
        for column, value in zip(episodes[-1][2:], (reward, terminated, truncated), strict=True):
            column.append(value)
        ended = terminated or truncated
        if ended and mode != "NextStep":
            begin()
            ended = False
    return [episode for episode in episodes if episode[1]]


def assert_recorded(found: Any, seeds: list[int], actions: list[Any], mode: str) -> None:
    """Every env's episodes are there in order, and equal to those of the env itself, the last ones cut."""
    metadata = about_each(found)
    for env, seed in enumerate(seeds):
        own = own_episodes(seed, [(batch[0][env], batch[1][env]) for batch in actions], mode)
        mine = [number for number, about in enumerate(metadata) if about["env_id"] == env]
        assert len(own) == len(mine) > 5
        assert [metadata[number].get("seed") for number in mine] == [seed, *[None] * (len(own) - 1)]
        for number, (observations, acted, rewards, terminations, truncations) in zip(mine, own, strict=True):
            episode = found[number]
            assert set(episode.observations) == {"image", "at", "x"}
            for key, column in episode.observations.items():
                assert_same(column, np.array([each[key] for each in observations]), key)
            for part, column in enumerate(episode.actions):
                assert_same(column, np.array([each[part] for each in acted]), f"action {part}")
            assert_same(episode.rewards, np.array(rewards, np.float64), "rewards")
            cut = not (terminations[-1] or truncations[-1])
            assert_same(episode.terminations, np.array(terminations), "terminations")
            assert_same(episode.truncations, np.array([*truncations[:-1], truncations[-1] or cut]), "truncations")
            ended = "cut" if cut else "terminated" if terminations[-1] else "truncated"
            assert metadata[number]["ended"] == ended


@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep"), pytest.param("Disabled")])
@pytest.mark.parametrize("lane", ["embedded", pytest.param("tcp", marks=pytest.mark.long)])
def test_data_read_back_is_what_the_envs_gave(served: ServedHub, tmp_path: Path, lane: str, mode: str) -> None:
    options: dict[str, Any] = {"autoreset_mode": mode, "record": tmp_path}
    if lane == "tcp":
        envs = envhub.make_vec("parts", NUM_ENVS, hub=served.tcp, **options)
    else:
        envs = envhub.make_vec(recorded_sims.Parts, NUM_ENVS, **options)
    seeds, actions = [5, 6, 7], []
    envs.reset(seed=seeds)
    envs.action_space.seed(1)
    for _ in range(STEPS):
        actions.append(envs.action_space.sample())
        _, _, terminations, truncations, _ = envs.step(actions[-1])
        if mode == "Disabled" and (ended := terminations | truncations).any():
            envs.reset(options={"reset_mask": ended})
    envs.close()
    assert envs.recorded.dropped == 0 and not envs.recorded.ended
    assert_recorded(data_set(tmp_path), seeds, actions, mode)
    folder = envs.recorded.folder
    assert sorted(path.name for path in folder.iterdir()) == ["data", "films", "recording.json"]
    about = json.loads((folder / "recording.json").read_text())
    assert about["env"] == ("parts" if lane == "tcp" else repr(recorded_sims.Parts))
    assert about["versions"]["gymnasium"] == gymnasium.__version__ and about["episodes"] == envs.recorded.episodes


def test_env_of_a_data_set_can_be_made_again(tmp_path: Path) -> None:
    envs = envhub.make_vec("Pendulum-v1", 2, record=str(tmp_path), env_kwargs={"g": 1.5})
    envs.reset(seed=1)
    envs.step(envs.action_space.sample())
    envs.close()
    assert data_set(tmp_path).recover_environment().unwrapped.g == 1.5
    assert json.loads((envs.recorded.folder / "recording.json").read_text())["kwargs"] == [{"g": 1.5}]


def test_two_sessions_have_two_folders(tmp_path: Path) -> None:
    for _ in range(2):
        envs = envhub.make_vec(sims.Counter, 2, record=tmp_path)
        envs.reset()
        envs.step([1, 1])
        envs.close()
    assert [data_set(tmp_path, number).total_steps for number in range(2)] == [2, 2]


def test_every_nth_episode_of_chosen_envs(tmp_path: Path) -> None:
    options = envhub.RecordOptions(tmp_path, env_ids=[0, 2], every=3)
    envs = envhub.make_vec(lambda: sims.Counter(length=4), 3, autoreset_mode="SameStep", record=options)
    envs.reset()
    for step in range(28):
        envs.step([step, 0, 2 * step])
    envs.close()
    found = data_set(tmp_path)
    by_env = {env: [n for n, about in enumerate(about_each(found)) if about["env_id"] == env] for env in range(3)}
    for env, factor in ((0, 1), (2, 2)):
        rewards = [found[number].rewards.tolist() for number in by_env[env]]
        assert rewards == [[factor * (12 * k + step) for step in range(4)] for k in range(3)]
    assert not by_env[1] and envs.recorded.dropped == 0


def test_infos_by_env_are_recorded_alike(tmp_path: Path) -> None:
    envs = envhub.make_vec(lambda: sims.Counter(length=4), 2, autoreset_mode="SameStep", record=tmp_path)
    envs.reset_each(None, None)
    for _ in range(8):
        envs.step_each(np.array([1, 2]))
    envs.close()
    finals = [episode.observations[:, 0].tolist() for episode in data_set(tmp_path)]
    assert finals == [[0, 1, 2, 3, 4]] * 4


# --- failures ---------------------------------------------------------------------------------------------------------


def test_only_the_episodes_in_which_an_env_failed(tmp_path: Path) -> None:
    options = envhub.RecordOptions(tmp_path, only="failed")
    with_worker_each = {"num_workers": 2, "record": options}
    envs = envhub.make_vec(lambda: sims.Counter(length=5), 2, **with_worker_each)  # type: ignore[arg-type]
    envs.reset()
    for _ in range(8):  # the first episode ends with the fifth step, and the sixth is a reset
        envs.step([1, 2])
    kill_worker(int(envs.call("pid")[1]))
    *_, truncations, infos = envs.step([3, 4])
    assert truncations.tolist() == [False, True] and infos["env_failure"][1].cause == "crash"
    for _ in range(9):
        envs.step([5, 6])
    envs.close()
    (about,) = about_each(found := data_set(tmp_path))
    assert (about["env_id"], about["ended"]) == (1, "failed") and about["failure"].startswith("crash: worker 1")
    assert found[0].rewards.tolist() == [2, 2, 0] and found[0].actions.tolist() == [2, 2, 4]
    assert found[0].truncations.tolist() == [False, False, True]


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


def test_a_wait_for_nothing_does_not_cut_episodes(tmp_path: Path) -> None:
    envs = envhub.make_vec(lambda: sims.Counter(length=4), 2, record=tmp_path)
    envs.reset()
    for _ in range(4):
        with pytest.raises(envhub.NothingPending):
            envs.step_wait()
        envs.step([1, 1])
    envs.close()
    assert [len(episode.rewards) for episode in data_set(tmp_path)] == [4, 4]


# --- whatever ends ----------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
import envhub, sims

envs = envhub.make_vec(lambda: sims.Counter(length=5), 2, record=sys.argv[1], autoreset_mode="SameStep")
envs.reset()
for step in range(int(sys.argv[2])):
    envs.step([step, step])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("steps", [13, pytest.param(2003, marks=pytest.mark.long)])
def test_killed_programs_episodes_are_all_there(tmp_path: Path, steps: int) -> None:
    here = Path(__file__).parent
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), str(steps)], cwd=here, timeout=60)
    assert ran.returncode == -signal.SIGKILL
    folder = tmp_path / "recording-v0"
    assert wait_until(lambda: not (folder / ".unfinished").exists(), 30)
    found = data_set(tmp_path)
    assert found.total_steps == 2 * steps
    assert sum(about["ended"] == "terminated" for about in about_each(found)) == 2 * (steps // 5)
    for episode in found:
        assert episode.observations[:, 0].tolist() == [*range(len(episode.rewards) + 1)]


def recorder_of(envs: Any) -> psutil.Process:
    (found,) = (
        process
        for process in psutil.Process().children()
        if "envhub_client.recording.process" in " ".join(process.cmdline())
    )
    return found


def test_program_goes_on_when_the_process_that_records_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envs = envhub.make_vec(lambda: sims.Counter(length=5), 2, record=tmp_path, autoreset_mode="SameStep")
    envs.reset()
    for _ in range(12):
        envs.step([1, 1])
    recorder = recorder_of(envs)
    recorder.kill()
    assert wait_until(lambda: bool(envs.recorded.ended), 10)
    assert [message for message in caplog.messages if "nothing more is recorded" in message]
    for _ in range(30):
        assert envs.step([1, 1])[0].shape == (2, 2)
    envs.reset()
    envs.close()
    assert not recorder.is_running()
    assert data_set(tmp_path).total_episodes == envs.recorded.episodes  # which is what was written before


def test_program_is_told_what_was_recorded_before_the_disk_took_no_more(tmp_path: Path) -> None:
    with contextlib.closing(envhub.make_vec(lambda: sims.Counter(length=5), 2, record=tmp_path)) as envs:
        envs.reset()
        assert wait_until(lambda: bool(envs.step([1, 1]) and envs.recorded.episodes), 10)
        recorder_of(envs).rlimit(psutil.RLIMIT_FSIZE, (64, 64))  # as on a full disk, a write fails
        assert wait_until(lambda: bool(envs.step([1, 1]) and envs.recorded.ended), 10)
        assert "OSError" in envs.recorded.ended
        found = data_set(tmp_path).total_episodes
        assert found == envs.recorded.episodes > 0
        assert not (envs.recorded.folder / ".unfinished").exists()


# --- limits -----------------------------------------------------------------------------------------------------------


def test_recording_ends_at_its_limit_of_episodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = envhub.RecordOptions(tmp_path, episodes_max=3)
    envs = envhub.make_vec(lambda: sims.Counter(length=2), 2, record=options, autoreset_mode="SameStep")
    envs.reset()
    for _ in range(20):
        envs.step([1, 1])
    envs.close()
    assert data_set(tmp_path).total_episodes == envs.recorded.episodes == 3
    assert envs.recorded.ended == "episodes_max=3 is reached"
    assert "episodes_max=3 is reached" in caplog.text


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


# --- films ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep", marks=pytest.mark.long)])
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


def test_space_without_a_fixed_size_is_refused(served: ServedHub, tmp_path: Path) -> None:
    before = len(worker_processes(served.process.pid))
    with pytest.raises(envhub.UnsupportedSpace, match="cannot be recorded"):
        envhub.make_vec("graphs", 2, hub=served.tcp, record=tmp_path)
    assert wait_until(lambda: len(worker_processes(served.process.pid)) == before)
    assert not os.listdir(tmp_path)


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    whole = [sys.executable, "-m", "envhub", "record", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, timeout=60, cwd=cwd, env=environ)


def test_command_records_what_a_policy_plays(served: ServedHub, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def act(observations):\n    return (observations[:, 2] > 0).astype(int)\n")
    ran = command("CartPole-v1", "runs", "--episodes", "3", "-n", "2", "--policy", "agent:act", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("3 episodes") and "recording-v0; 0 were dropped" in ran.stdout
    for episode in (found := data_set(tmp_path / "runs")):
        assert episode.actions.tolist() == (episode.observations[:-1, 2] > 0).astype(int).tolist()
    assert found.total_episodes == 3
    at_hub = command("parts", "runs", "--hub", served.tcp, "--episodes", "4", "--film", "1", cwd=tmp_path)
    assert at_hub.returncode == 0, at_hub.stderr
    assert data_set(tmp_path / "runs", 1).total_episodes == 4
    assert [film.suffix for film in (tmp_path / "runs/recording-v1/films").iterdir()]


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["CartPole-v1", "runs", "--policy", "nowhere:act"], 1, "there is no policy 'nowhere:act'"),
        (["CartPole-v1", "runs", "--film", "9"], 2, "film has envs that are not recorded"),
        (["NoSuch-v1", "runs"], 1, "NoSuch"),
    ],
)
def test_command_says_in_a_line_what_is_wrong(tmp_path: Path, arguments: list[str], status: int, told: str) -> None:
    ran = command(*arguments, cwd=tmp_path)
    assert ran.returncode == status and told in ran.stderr and "Traceback" not in ran.stderr
