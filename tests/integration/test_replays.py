"""Envs that failed are run again: the file of each failure holds enough to fail alike."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from brittle import CAUSES, Brittle
from conftest import lane_address
from envhub_client.private_hub.process import private_hub
from envhub_server import replay
from envhub_server.catalog.replay_folder import files_in
from envhub_server.ipc import replay_file
from gymnasium.vector import AutoresetMode
from hubs import ServedHub, serve, wait_until, worker_processes

import envhub
from envhub.values import codec

FOLDER = Path(os.environ["ENVHUB_REPLAYS"])
OPTIONS = {
    "on_exception": "truncate",
    "on_invalid": "truncate",
    "step_timeout": 1.0,
    "init_timeout": 10.0,
    "restarts_max": 1000,
}


@contextlib.contextmanager
def made(address: str | None, cause: str, num_envs: int = 2, **options: Any) -> Iterator[envhub.HubVectorEnv]:
    """Brittle envs, each with a worker of its own unless ``options`` say otherwise."""
    arguments = {name: options.pop(name) for name in ("rate", "length", "width", "unlike") if name in options}
    options = {**OPTIONS, "num_workers": num_envs, **options}
    if cause == "memory":
        options |= {"memory_max": 600 << 20, "step_timeout": 60.0, "init_timeout": 60.0}
    if address is None:
        envs = envhub.make_vec(partial(Brittle, cause=cause, **arguments), num_envs, **options)
    else:
        envs = envhub.make_vec("brittle", num_envs, hub=address, env_kwargs={"cause": cause, **arguments}, **options)
    with contextlib.closing(envs):
        yield envs


def failures(envs: envhub.HubVectorEnv, count: int) -> list[envhub.EnvFailure]:
    """The failures of envs that are stepped until so many have failed."""
    rng, found = np.random.default_rng(1), []
    while len(found) < count:
        infos = envs.step(rng.integers(0, 5, envs.num_envs))[4]
        found += [infos["env_failure"][row] for row in np.flatnonzero(infos.get("_env_failure", ()))]
    return found[:count]


def path_of(failure: envhub.EnvFailure) -> Path:
    path = FOLDER / f"{failure.replay}.replay"
    assert failure.replay and wait_until(path.exists, 10)  # on the shared lane the trainer may be ahead of the hub
    return path


def run(failure: envhub.EnvFailure) -> replay.Comparison:
    return replay.run(path_of(failure))


@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=pytest.mark.long if cause in ("hang", "memory") else ()) for cause in CAUSES]
)
def test_failed_env_fails_alike_when_it_is_run_again(cause: str, address: str | None) -> None:
    with made(address, cause) as envs:
        envs.reset(seed=3)
        for failure in failures(envs, 2):
            verdict = run(failure)
            assert verdict.alike, verdict.text
            assert "failed alike" in verdict.text


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("lane", ["embedded", "tcp"])
def test_hundred_failures_of_a_cause_are_run_again_alike(cause: str, lane: str, request: pytest.FixtureRequest) -> None:
    address = lane_address(request, lane)
    # Several envs, since one that fails again and again is restarted later and later.
    with made(address, cause, 8 if cause == "memory" else 16, rate=0.03, length=30) as envs:
        envs.reset(seed=3)
        with ThreadPoolExecutor(2) as threads:
            alike = [*threads.map(run, failures(envs, 100))]
    assert not [verdict.text for verdict in alike if not verdict.alike]
    assert len(alike) == 100


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_failed_env_fails_alike_in_every_autoreset_mode(mode: AutoresetMode, address: str | None) -> None:
    with made(address, "exception", 3, num_workers=1, autoreset_mode=mode, rate=0.02) as envs:
        envs.reset(seed=3)
        rng = np.random.default_rng(1)
        found: list[envhub.EnvFailure] = []
        while len(found) < 3:
            *_, terminations, truncations, infos = envs.step(rng.integers(0, 5, 3))
            found += [infos["env_failure"][row] for row in np.flatnonzero(infos.get("_env_failure", ()))]
            over = terminations | truncations
            if mode is AutoresetMode.DISABLED and over.any():
                envs.reset(options={"reset_mask": over})
        for failure in found:
            verdict = run(failure)
            assert verdict.alike, verdict.text


def test_reset_that_fails_is_run_after_the_episode_before_it(address: str | None) -> None:
    with made(address, "exit", rate=0.0, restarts_max=1) as envs:
        envs.reset(seed=3)
        envs.step(np.array([1, 2]))
        before = set(files_in(FOLDER))
        with pytest.raises(envhub.RestartsExhausted):  # for it is reset again, and again
            envs.reset(seed=4, options={"fail": True})
        (path, *_) = [path for path in files_in(FOLDER) if path not in before][-1:]
        found = replay.read(path)
        assert (found.failed_at, len(found.calls().kinds)) == (2, 3)
        verdict = replay.run(path)
        assert verdict.alike, verdict.text


def test_exception_that_is_raised_names_its_replay(address: str | None) -> None:
    with made(address, "exception", on_exception="raise", rate=1.0) as envs:
        envs.reset(seed=3)
        with pytest.raises(ValueError, match="brittle") as caught:
            envs.step(np.array([1, 2]))
        remote = caught.value.__cause__
        assert isinstance(remote, envhub.EnvRaised)
        verdict = replay.run(FOLDER / f"{remote.replay}.replay")
        assert verdict.alike, verdict.text


def test_simulator_that_is_not_deterministic_is_told_as_such(address: str | None) -> None:
    with made(address, "exception", unlike=True, rate=0.05) as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
        verdict = run(failure)
        assert not verdict.alike
        assert verdict.text.startswith("non-deterministic simulator: observation differs first at step 1;")


@pytest.mark.long
def test_failure_after_long_training_is_run_from_known_random_numbers(address: str | None) -> None:
    """The journal has long forgotten the reset with a seed, which is 20,000 steps ago."""
    with made(address, "exception", rate=0.0, length=50, width=2) as envs:
        envs.reset(seed=3)
        for _ in range(20_000):
            envs.step(np.zeros(2, int))
        envs.set_attr("rate", 0.2)
        envs.set_attr("rate", 0.0)
        envs.step(np.zeros(2, int))
        envs.set_attr("rate", 1.0)
        (failure,) = failures(envs, 1)
        found = replay.read(path_of(failure))
        assert found.calls().begins == "generator"
        assert 0 < len(found.calls().kinds) < 2000


@pytest.mark.long
def test_episode_longer_than_the_journal_is_said_to_be_cut(address: str | None) -> None:
    with made(address, "exception", 1, rate=0.0, length=10**6, width=2) as envs:
        envs.reset(seed=3)
        for _ in range(20_000):
            envs.step(np.zeros(1, int))
        envs.set_attr("rate", 1.0)
        (failure,) = failures(envs, 1)
        with pytest.raises(replay.ReplayError, match="longer than the journal, which holds 16384 batches"):
            run(failure)


def test_factory_without_a_name_cannot_be_run_again() -> None:
    with contextlib.closing(envhub.make_vec(lambda: Brittle("exit", rate=1.0), 1, **OPTIONS)) as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
        with pytest.raises(replay.ReplayError, match="factory of the env, which has no name"):
            run(failure)


def test_file_holds_data_only(address: str | None) -> None:
    with made(address, "exit") as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
        blob = path_of(failure).read_bytes()
        found = replay_file.unpack(blob)
        assert not any(found.build[name] for name in ("factories", "registrations", "environ", "authkey", "runner"))
        assert found.versions["numpy"] == np.__version__ and found.versions["gymnasium"] == gym.__version__
        assert found.failure["exit_status"] == 3


class Touches:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_file_that_no_hub_wrote_runs_no_code_of_its_own(tmp_path: Path) -> None:
    with made(None, "exit") as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
        found = codec.decode(path_of(failure).read_bytes())
    touched, file = tmp_path / "touched", tmp_path / "foreign.replay"
    pickled = pickle.dumps(Touches(touched))
    changes: list[dict[str, Any]] = [
        {"build": {**found["build"], "factories": pickled}},
        {"build": {**found["build"], "registrations": pickled}},
        {"build": {**found["build"], "runner": pickled}},
        {"build": {**found["build"], "allow_pickle": True}},
        {"failure": {}},
        {"failure": {**found["failure"], "message": 3}},
        {"interpreter": {}},
        {"history": {**found["history"], "kinds": "abc"}},
        {"history": {**found["history"], "actions": []}},
        {"history": {**found["history"], "notes": [[1, 2]]}},
    ]
    for change in changes:
        file.write_bytes(codec.encode({**found, **change}))
        with pytest.raises(replay.ReplayError, match=r"foreign\.replay"):
            replay.run(file)
    assert not touched.exists()
    assert command("replays", str(tmp_path)).stdout.startswith("foreign: ")


def command(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "envhub", *words]
    return subprocess.run(line, capture_output=True, text=True, input=stdin, timeout=60, check=False)


def test_commands_list_replays_and_run_them() -> None:
    with made(None, "exit") as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
    assert f"{failure.replay}: worker " in command("replays").stdout
    ran = command("replay", failure.replay)
    assert (ran.returncode, ran.stdout.startswith("failed alike: ended by status 3 at step ")) == (0, True)
    assert ran.stderr.startswith(f"runs brittle:Brittle with {sys.executable} in {os.getcwd()}, modules from ")
    stopped = command("replay", failure.replay, "--until", "1")
    assert (stopped.returncode, stopped.stdout) == (0, "stopped before step 1\n")
    debugged = command("replay", failure.replay, "--until", "1", "--pdb", stdin="print('here', self.steps)\nquit\n")
    assert "here 0" in debugged.stdout
    assert command("replay", "nothing-1").returncode == 2


def test_hub_that_keeps_none_names_none(tmp_path: Path) -> None:
    options = "--replays", str(tmp_path / "kept"), "--replays-max", "0"
    with serve(tmp_path, "brittle=brittle:Brittle", *options) as hub, made(hub.tcp, "exit") as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
        assert failure.replay == ""
    assert not (tmp_path / "kept").exists()


def test_oldest_files_give_way(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    options = "--replays", str(folder), "--replays-max", "3"
    with (
        serve(tmp_path, "brittle=brittle:Brittle", *options) as hub,
        made(hub.tcp, "exception", rate=0.5) as envs,
    ):
        envs.reset(seed=3)
        found = failures(envs, 6)
    kept = {path.stem for path in files_in(folder)}
    assert len(kept) == 3 and found[0].replay not in kept


def test_film_shows_every_step_of_the_run(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    film = tmp_path / "film.mp4"
    with contextlib.closing(envhub.make_vec("CartPole-v1", 1, step_timeout=60.0)) as envs:
        envs.reset(seed=3)
        for _ in range(5):
            envs.step(np.zeros(1, int))
        before = set(files_in(FOLDER))
        for worker in worker_processes(private_hub().pid):
            worker.kill()
        assert wait_until(lambda: set(files_in(FOLDER)) - before, 10)
    (path,) = set(files_in(FOLDER)) - before
    line = [sys.executable, "-m", "envhub", "replay", str(path), "--video", str(film)]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1 and ran.stdout.startswith("did not fail, and every observation was the same"), ran
    with av.open(str(film)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 6


@pytest.mark.parametrize("env", ["CartPole-v1", "Blackjack-v1", "HalfCheetah-v5", "ALE/Pong-v5"])
def test_env_that_was_killed_observes_the_same_again(
    env: str, address: str | None, request: pytest.FixtureRequest
) -> None:
    """Whatever it observes, by several episodes; that it did not fail tells a kill from outside."""
    gym.register_envs(ale_py)
    wrapped = copy.deepcopy(gym.spec(env))  # which is the one that is registered
    wrapped.additional_wrappers = (gym.wrappers.TimeLimit.wrapper_spec(max_episode_steps=15),)
    with contextlib.closing(envhub.make_vec(wrapped, 2, hub=address, num_workers=2)) as envs:
        envs.reset(seed=3)
        rng = np.random.default_rng(1)
        for _ in range(50):
            envs.step(np.array([rng.integers(0, 2)] * 2) if env != "HalfCheetah-v5" else rng.random((2, 6)))
        before = set(files_in(FOLDER))
        hub = private_hub().pid if address is None else request.getfixturevalue("hub").process.pid
        for worker in worker_processes(hub):
            worker.kill()
        assert wait_until(lambda: len(set(files_in(FOLDER)) - before) >= 2, 10)
    name = "env-" if address is None else env.replace("/", "-")
    paths = [path for path in set(files_in(FOLDER)) - before if path.name.startswith(name)]
    for path in paths:
        assert replay.read(path).calls().begins == "made"
        assert replay.run(path).text.startswith("did not fail, and every observation was the same")


def test_part_of_a_batch_fails_alike(address: str | None) -> None:
    with made(address, "exception", 4, num_workers=1, rate=0.1) as envs:
        envs.reset(seed=3)
        rng = np.random.default_rng(1)
        found: list[envhub.EnvFailure] = []
        envs.send(rng.integers(0, 5, 4))
        while len(found) < 2:
            *_, infos, env_ids = envs.recv(min_envs=1)
            found += [failure for failure in infos.get("env_failure", ()) if failure is not None]
            envs.send(rng.integers(0, 5, len(env_ids)), env_ids)
        for failure in found:
            verdict = run(failure)
            assert verdict.alike, verdict.text


def test_env_that_another_client_took_over_fails_alike(hub: ServedHub) -> None:
    with made(hub.ipc, "exit", 1, rate=0.0, lane="auto") as envs:
        envs.reset(seed=3)
        for number in range(5):
            envs.step(np.array([number]))
        token = envs.detach()
    with envhub.connect(hub.tcp) as client, contextlib.closing(client.attach(token)) as envs:
        for number in range(5):
            envs.step(np.array([number]))
        before = set(files_in(FOLDER))
        envs.set_attr("rate", 1.0)
        envs.step(np.array([1]))
        assert wait_until(lambda: set(files_in(FOLDER)) - before, 10)
        (path,) = [path for path in set(files_in(FOLDER)) - before if "brittle" in path.name]
    assert len(replay.read(path).calls().kinds) == 12  # the steps before, too
    assert "(not run again: calls of rate)" in replay.run(path).text


def test_id_that_only_the_program_has_registered_is_run_again() -> None:
    gym.register("Brittle-v3", "brittle:Brittle", kwargs={"cause": "exit"})
    try:
        with contextlib.closing(envhub.make_vec("Brittle-v3", 2, num_workers=2, **OPTIONS)) as envs:
            envs.reset(seed=3)
            for failure in failures(envs, 2):
                verdict = run(failure)
                assert verdict.alike, verdict.text
    finally:
        del gym.registry["Brittle-v3"]


def test_arguments_that_are_no_data_are_not_kept() -> None:
    gym.register("Brittle-v4", "brittle:Brittle")
    try:
        arguments = {"cause": "exit", "unlike": object()}
        with contextlib.closing(envhub.make_vec("Brittle-v4", 1, env_kwargs=arguments, **OPTIONS)) as envs:
            envs.reset(seed=3)
            (failure,) = failures(envs, 1)
            with pytest.raises(replay.ReplayError, match="lacks what is no plain data: the arguments of the env"):
                run(failure)
    finally:
        del gym.registry["Brittle-v4"]
