"""Envs that failed are run again: the file of each failure holds enough to fail alike."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from brittle import CAUSES, Brittle, Tuned, tune
from envhub_client.private_hub.process import private_hub
from envhub_server import replay
from envhub_server.catalog.replay_folder import files_in
from envhub_server.ipc import replay_file
from gymnasium.vector import AutoresetMode
from hubs import LANES, ServedHub, lane_address, serve, wait_until, worker_processes, written_replay

import envhub
from envhub.values import codec

FOLDER = Path(os.environ["ENVHUB_REPLAYS"])
OPTIONS = {
    "on_exception": "truncate",
    "on_invalid": "truncate",
    "step_timeout": 60.0,
    "init_timeout": 60.0,
    "restarts_max": 1000,
}
HANG_S = 3.0  # for envs that hang, and no others: a slow machine may stall


@contextlib.contextmanager
def made(address: str | None, cause: str, num_envs: int = 2, **options: Any) -> Iterator[envhub.HubVectorEnv]:
    """Brittle envs, each with a worker of its own unless ``options`` say otherwise."""
    arguments = {name: options.pop(name) for name in ("rate", "length", "width", "unlike") if name in options}
    options = {**OPTIONS, "num_workers": num_envs, **options}
    if cause == "memory":
        options |= {"memory_max": 600 << 20}
    if cause == "hang":
        options |= {"step_timeout": HANG_S, "init_timeout": 10.0}  # which an env's first step has, too
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


def some_of(*few: tuple[str, str], among: Iterable[str]) -> list[Any]:
    """All of these on every lane: a few always, others where there is time, and by ipc in the chaos tests."""
    long, chaos = pytest.mark.long, pytest.mark.chaos
    combined = itertools.product(LANES, among)
    return [pytest.param(*each, marks=() if each in few else chaos if each[0] == "ipc" else long) for each in combined]


def session_of(path: Path) -> str:
    return path.stem.partition("-worker")[0]


def run(failure: envhub.EnvFailure | envhub.EnvRaised) -> replay.Comparison:
    return replay.run(written_replay(failure.replay))


@pytest.mark.parametrize(
    ("address", "cause"), some_of(("embedded", "exception"), ("tcp", "exit"), among=CAUSES), indirect=["address"]
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
    for path in files_in(FOLDER):  # one session has a hundred only where others want no room
        path.unlink()
    # Several envs, since one that fails again and again is restarted later and later.
    with made(address, cause, 8 if cause == "memory" else 16, rate=0.03, length=30) as envs:
        envs.reset(seed=3)
        with ThreadPoolExecutor(2) as threads:
            alike = [*threads.map(run, failures(envs, 100))]
    assert not [verdict.text for verdict in alike if not verdict.alike]
    assert len(alike) == 100


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", [AutoresetMode.SAME_STEP, pytest.param(AutoresetMode.DISABLED, marks=pytest.mark.long)]
)
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


@pytest.mark.long
def test_reset_that_fails_is_run_after_the_episode_before_it(address: str | None) -> None:
    with made(address, "exit", rate=0.0, restarts_max=1) as envs:
        envs.reset(seed=3)
        envs.step(np.array([1, 2]))
        others = {*map(session_of, files_in(FOLDER))}  # one more of theirs may still be written
        with pytest.raises(envhub.RestartsExhausted):  # for it is reset again, and again
            envs.reset(seed=4, options={"fail": True})
        assert wait_until(lambda: bool({*map(session_of, files_in(FOLDER))} - others))
        path = [path for path in files_in(FOLDER) if session_of(path) not in others][-1]
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
        verdict = run(remote)
        assert verdict.alike, verdict.text


@pytest.mark.long
def test_exceptions_that_the_env_outlived_are_run_again_before_the_one_that_is_told(address: str | None) -> None:
    with made(address, "exception", num_workers=1, on_exception="raise", rate=0.05) as envs:
        envs.reset(seed=3)
        rng, found = np.random.default_rng(1), list[envhub.EnvRaised]()
        while len(found) < 3:
            try:
                envs.step(rng.integers(0, 5, 2))
            except ValueError as error:
                assert isinstance(error.__cause__, envhub.EnvRaised)
                found.append(error.__cause__)
                envs.reset(seed=None if len(found) == 2 else 4)
    for each in found:
        verdict = run(each)
        assert verdict.alike, verdict.text


class WarmsUp(Brittle):
    """Its first reset fails."""

    warm = False

    def reset(self, **how: Any) -> Any:
        if not self.warm:
            self.warm = True
            raise ArithmeticError("it warms up")
        return super().reset(**how)

    def step(self, action: int) -> Any:
        if action == 4:
            os._exit(3)
        return super().step(action)


@pytest.mark.long
def test_exception_of_the_first_reset_after_a_crash_shows_no_observation_to_compare() -> None:
    with contextlib.closing(envhub.make_vec(partial(WarmsUp, "exception", 0.0), on_exception="raise")) as envs:

        def reset() -> None:
            with pytest.raises(ArithmeticError, match="warms up"):
                envs.reset(seed=3)
            envs.reset(seed=3)

        reset()
        envs.step([1])
        assert envs.step([4])[3].all()
        reset()
        envs.step([2])
        envs.set_attr("rate", 1.0)
        with pytest.raises(ValueError, match="brittle") as raised:
            envs.step([3])
        assert isinstance(raised.value.__cause__, envhub.EnvRaised)
        verdict = run(raised.value.__cause__)
    assert "differs" not in verdict.text, verdict.text


def test_steps_are_counted_from_the_last_reset_whoever_asked_for_it(address: str | None) -> None:
    with made(address, "exit", 1, rate=0.0) as envs:
        envs.reset(seed=3)
        for _ in range(12):  # seven steps, the reset after them, four steps
            envs.step(np.zeros(1, int))
        envs.set_attr("rate", 1.0)
        (failure,) = failures(envs, 1)
    assert run(failure).text.endswith(
        "ended by status 3 at step 13 (5 of its episode) before (not run again: calls of rate)"
    )


def test_simulator_whose_attribute_was_set_is_not_called_non_deterministic(address: str | None) -> None:
    with made(address, "exception", rate=0.05) as envs:
        envs.set_attr("unlike", True)
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
    text = run(failure).text
    assert text.startswith("observation differs first at step 1;") and text.endswith("(not run again: calls of unlike)")


def test_simulator_that_is_not_deterministic_is_told_as_such(address: str | None) -> None:
    with made(address, "exception", unlike=True, rate=0.05) as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
        verdict = run(failure)
        assert not verdict.alike
        assert verdict.text.startswith("non-deterministic simulator: observation differs first at step 1;")


@pytest.mark.long
@pytest.mark.parametrize(
    "address", ["embedded", *(pytest.param(lane, marks=pytest.mark.chaos) for lane in ("ipc", "tcp"))], indirect=True
)
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
        found = replay.read(written_replay(failure.replay))
        assert found.calls().begins == "generator"
        assert 0 < len(found.calls().kinds) < 2000


@pytest.mark.chaos
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
        with pytest.raises(replay.ReplayError, match="factory of the env, which is in no module"):
            run(failure)


def test_worker_is_set_up_again_by_the_name_of_what_did_it() -> None:
    for setup in ("brittle:tune", tune):
        tuned = partial(Tuned, "exit")
        with contextlib.closing(envhub.make_vec(tuned, 1, worker_setup=setup, **OPTIONS)) as envs:
            envs.reset(seed=3)
            (failure,) = failures(envs, 1)
            if isinstance(setup, str):
                assert "runs brittle:tune, brittle:Tuned with" in replay.announced(written_replay(failure.replay))
                assert run(failure).alike
            else:
                with pytest.raises(replay.ReplayError, match="what sets up its worker, which has no name"):
                    run(failure)


def test_file_holds_data_only(address: str | None) -> None:
    with made(address, "exit") as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
        blob = written_replay(failure.replay).read_bytes()
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
        found = codec.decode(written_replay(failure.replay).read_bytes())
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
    assert command("replays", str(tmp_path)).stdout.startswith("foreign\t")


def command(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "envhub", *words]
    return subprocess.run(line, capture_output=True, text=True, input=stdin, timeout=60, check=False)


@pytest.mark.long
def test_commands_list_replays_and_run_them() -> None:
    with made(None, "exit") as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
    written_replay(failure.replay)
    rows = [line.split("\t") for line in command("replays").stdout.splitlines()]
    (row,) = (row for row in rows if row[0] == failure.replay)
    assert row[2] == "" and row[3].startswith("worker ")
    ran = command("replay", failure.replay)
    assert (ran.returncode, ran.stdout.startswith("failed alike: ended by status 3 at step ")) == (0, True)
    assert ran.stderr.startswith(f"runs brittle:Brittle with {sys.executable} in {os.getcwd()}, modules from ")
    stopped = command("replay", failure.replay, "--until", "1")
    assert (stopped.returncode, stopped.stdout) == (0, "stopped before step 1\n")
    debugged = command("replay", failure.replay, "--until", "1", "--pdb", stdin="print('here', self.steps)\nquit\n")
    assert "here 0" in debugged.stdout
    assert command("replay", "nothing-1").returncode == 2


@pytest.mark.long
def test_file_from_elsewhere_is_run_only_if_it_is_trusted(tmp_path: Path) -> None:
    with made(None, "exit") as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
    own, elsewhere, linked = written_replay(failure.replay), tmp_path / "sent.replay", FOLDER / "linked.replay"
    elsewhere.write_bytes(own.read_bytes())
    linked.symlink_to(elsewhere)
    try:
        for path in (elsewhere, linked):
            refused = command("replay", str(path))
            assert (refused.returncode, refused.stdout) == (2, "")
            announced, why = refused.stderr.splitlines()
            assert announced.startswith(f"runs brittle:Brittle with {sys.executable} in ")
            no_own = "it is no file of yours in the folder of your hubs, or another user could replace it there"
            assert why == f"envhub replay: {path} is not run, for {no_own}; --trust runs it"
            trusted = command("replay", str(path), "--trust")
            assert (trusted.returncode, trusted.stdout.startswith("failed alike: ended by status 3")) == (0, True)
    finally:
        linked.unlink()


def test_file_of_another_user_is_not_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "a.replay").touch()
    assert replay.is_own(path, tmp_path)
    assert not replay.is_own(path, None) and not replay.is_own(tmp_path / "b.replay", tmp_path)
    tmp_path.chmod(0o777)  # so that another user could put a file of his in its place before it is run
    assert not replay.is_own(path, tmp_path)
    tmp_path.chmod(0o1777)
    assert replay.is_own(path, tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert not replay.is_own(path, tmp_path)


@pytest.mark.long
def test_hub_that_keeps_none_names_none(tmp_path: Path) -> None:
    options = "--replays", str(tmp_path / "kept"), "--replays-max", "0"
    with serve(tmp_path, "brittle=brittle:Brittle", *options) as hub, made(hub.tcp, "exit") as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
        assert failure.replay == ""
    assert not (tmp_path / "kept").exists()


@pytest.mark.long
def test_oldest_files_give_way(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    options = "--replays", str(folder), "--replays-max", "3"
    with (
        serve(tmp_path, "brittle=brittle:Brittle", *options) as hub,
        made(hub.tcp, "exception", rate=0.5) as envs,
    ):
        envs.reset(seed=3)
        found = failures(envs, 6)
        assert wait_until((folder / f"{found[-1].replay}.replay").exists)
    kept = {path.stem for path in files_in(folder)}
    assert len(kept) == 3 and found[0].replay not in kept


@pytest.mark.long
def test_film_shows_every_step_of_the_run(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    film = tmp_path / "film.mp4"
    with contextlib.closing(envhub.make_vec("CartPole-v1", 1, step_timeout=60.0)) as envs:
        envs.reset(seed=3)
        for _ in range(5):
            envs.step(np.zeros(1, int))
        before = set(files_in(FOLDER))

        def new() -> list[Path]:
            return [path for path in set(files_in(FOLDER)) - before if path.name.startswith("CartPole-v1-")]

        for worker in worker_processes(private_hub().pid):
            worker.kill()
        assert wait_until(lambda: bool(new()))
    (path,) = new()
    line = [sys.executable, "-m", "envhub", "replay", str(path), "--video", str(film)]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1 and ran.stdout.startswith("did not fail, and every observation was the same"), ran
    with av.open(str(film)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 6


class Plain(Brittle):
    """Shows frames, and takes no render mode."""

    metadata = {"render_fps": 20}

    def render(self) -> Any:
        return np.full((16, 20, 3), self.steps, np.uint8)


@pytest.mark.long
@pytest.mark.parametrize(("env", "frames"), [(Plain, True), (Brittle, False)])
def test_env_that_takes_no_render_mode_is_filmed_if_it_shows_frames(
    env: type[Brittle], frames: bool, tmp_path: Path
) -> None:
    pytest.importorskip("av")
    film = tmp_path / "film.mp4"
    with contextlib.closing(envhub.make_vec(partial(env, cause="exception"), 1, **OPTIONS)) as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
    ran = command("replay", written_replay(failure.replay).stem, "--video", str(film))
    assert ran.stdout.startswith("failed alike: ") and film.exists() is frames, ran
    assert ("it shows no frames: NotImplementedError\n" in ran.stdout) is not frames
    assert (f"envhub replay: there is no film {film}: the env drew no frame" in ran.stderr) is not frames
    assert ran.returncode == (0 if frames else 1)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [(), ("--until", "1")])
def test_debugger_that_is_left_ends_the_run_without_a_verdict(arguments: tuple[str, ...]) -> None:
    with made(None, "exit") as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
    ran = command("replay", written_replay(failure.replay).stem, "--pdb", *arguments, stdin="quit\n")
    assert ran.returncode == 0 and "where the debugger was left" in ran.stdout, ran


@pytest.mark.long
@pytest.mark.parametrize(
    ("address", "env"),
    some_of(
        *(("embedded", "CartPole-v1"), ("tcp", "Blackjack-v1")),
        among=["CartPole-v1", "Blackjack-v1", "HalfCheetah-v5", "ALE/Pong-v5"],
    ),
    indirect=["address"],
)
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
        name = "env-" if address is None else env.replace("/", "-")

        def new() -> list[Path]:
            return [path for path in set(files_in(FOLDER)) - before if path.name.startswith(name)]

        assert wait_until(lambda: len(new()) >= 2)
    paths = new()
    for path in paths:
        assert replay.read(path).calls().begins == "made"
        assert replay.run(path).text.startswith("did not fail, and every observation was the same")


@pytest.mark.long
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
        envs.set_attr("rate", 1.0)
        failure = envs.step(np.array([1]))[4]["env_failure"][0]
        path = written_replay(failure.replay)
    assert token[:8] not in path.name  # for who knows the token has the session
    assert len(replay.read(path).calls().kinds) == 12  # the steps before, too
    assert "(not run again: calls of rate)" in replay.run(path).text


@pytest.mark.long
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
