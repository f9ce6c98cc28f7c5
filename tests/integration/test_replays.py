"""Envs that failed are run again: the file of each failure holds enough to fail alike."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from brittle import CAUSES, Brittle, Tuned, tune
from envhub_client.private_hub.process import private_hub
from envhub_server import replay
from envhub_server.ipc import replay_file
from envhub_server.ipc.replay_file import entries_in
from gymnasium.vector import AutoresetMode
from hubs import ServedHub, serve, wait_until, worker_processes, written_replay

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


def failed(address: str | None, cause: str, **options: Any) -> envhub.EnvFailure:
    """The first failure of such envs, which have ended since."""
    with made(address, cause, **options) as envs:
        envs.reset(seed=3)
        return failures(envs, 1)[0]


def files_in(folder: Path) -> list[Path]:
    return [path for path, _ in replay.files_in(folder)]


def calls_of(path: Path) -> list[str]:
    """What the env of a replay was asked, without running it."""
    found = replay.read(path)
    trace = codec.decode(found.trace)
    return [kind for _, kind, *_ in entries_in(trace["entries"]) if kind != "codes"] + ["step"] * (
        len(trace["rings"][0]) // 8
    )


def session_of(path: Path) -> str:
    return path.stem.partition("-worker")[0]


def run(failure: envhub.EnvFailure | envhub.EnvRaised) -> replay.Comparison:
    return replay.run(written_replay(failure.replay))


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        *(("embedded", "exception"), ("tcp", "exit")),
        *(pytest.param(lane, cause, marks=pytest.mark.long) for lane in ("embedded", "tcp") for cause in CAUSES),
    ],
    indirect=["address"],
)
def test_failed_env_fails_alike_when_it_is_run_again(cause: str, address: str | None) -> None:
    with made(address, cause) as envs:
        envs.reset(seed=3)
        for failure in failures(envs, 2):
            verdict = run(failure)
            assert verdict.alike, verdict.text
            assert "failed alike" in verdict.text


@pytest.mark.long
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


@pytest.mark.long
def test_reset_that_fails_is_run_alone(address: str | None) -> None:
    with made(address, "exit", rate=0.0, restarts_max=1) as envs:
        envs.reset(seed=3)
        envs.step(np.array([1, 2]))
        others = {*map(session_of, files_in(FOLDER))}  # one more of theirs may still be written
        with pytest.raises(envhub.RestartsExhausted):  # for it is reset again, and again
            envs.reset(seed=4, options={"fail": True})
        assert wait_until(lambda: bool({*map(session_of, files_in(FOLDER))} - others))
        path = [path for path in files_in(FOLDER) if session_of(path) not in others][-1]
        assert calls_of(path) == ["reset"]
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


def test_attributes_that_were_set_are_set_again(address: str | None) -> None:
    with made(address, "exit", 1, rate=0.0) as envs:
        envs.set_attr("length", 9)
        envs.reset(seed=3)
        for _ in range(14):  # nine steps, the reset after them, four steps
            envs.step(np.zeros(1, int))
        envs.set_attr("rate", 1.0)
        (failure,) = failures(envs, 1)
    assert run(failure).text == "failed alike: ended by status 3 at step 15"


class Called(Brittle):
    """Does what its program calls."""

    def drive(self, *, cause: str) -> None:
        """Fail from the next step on."""
        self.cause, self.rate = cause, 1.0

    def end(self) -> None:
        """End its process."""
        os._exit(4)


@pytest.mark.long
def test_calls_are_made_again() -> None:
    with contextlib.closing(envhub.make_vec(partial(Called, "exit", 0.0), 2, num_workers=2, **OPTIONS)) as envs:
        envs.reset(seed=3)
        envs.step(np.zeros(2, int))
        envs.call("drive", cause="exception")
        (failure, _) = failures(envs, 2)
        assert run(failure).text.startswith("failed alike: raised ValueError: brittle at ")
        envs.step(np.zeros(2, int))  # their resets
        with pytest.raises(envhub.WorkerDied):
            envs.call("end")
        failure = next(filter(None, envs.step(np.zeros(2, int))[4]["env_failure"]))
        assert run(failure).text == "failed alike: ended by status 4 at call of end"


class Told(Brittle):
    """Takes texts, which have no fixed size."""

    action_space = gym.spaces.Text(9)

    def step(self, action: str) -> Any:
        if action == "boom":
            raise ValueError(f"{action} at {self.place[0]:.6f}")
        return super().step(len(action))


def test_actions_of_no_fixed_size_are_given_again() -> None:
    with contextlib.closing(envhub.make_vec(partial(Told, "exit", 0.0), 2, num_workers=1, **OPTIONS)) as envs:
        envs.reset(seed=3)
        envs.step(("a", "bcd"))
        failure = envs.step(("ab", "boom"))[4]["env_failure"][1]
    assert run(failure).text.startswith("failed alike: raised ValueError: boom at ")


def test_env_that_draws_what_no_seed_decides_fails_otherwise(address: str | None) -> None:
    failure = failed(address, "exception", unlike=True, width=1, rate=0.05)
    verdict = run(failure)
    assert not verdict.alike and " before" in verdict.text


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
    blob = written_replay(failed(address, "exit").replay).read_bytes()
    found = replay_file.unpack(blob)
    assert not any(found.build[name] for name in ("factories", "registrations", "environ", "authkey", "runner"))
    assert (found.cause, found.ended) == ("crash", "status 3")


class Touches:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_file_that_no_hub_wrote_runs_no_code_of_its_own(tmp_path: Path) -> None:
    failure = failed(None, "exit")
    found = codec.decode(written_replay(failure.replay).read_bytes())
    touched, file = tmp_path / "touched", tmp_path / "foreign.replay"
    pickled = pickle.dumps(Touches(touched))
    changes: list[dict[str, Any]] = [
        {"build": {**found["build"], "factories": pickled}},
        {"build": {**found["build"], "registrations": pickled}},
        {"build": {**found["build"], "runner": pickled}},
        {"build": {**found["build"], "allow_pickle": True}},
        {"cause": 3},
        {"python": None},
        {"trace": b"abc"},
        {"trace": codec.encode({"cut": "", "first": 0, "entries": b"", "rings": [b"abc"]})},
    ]
    for change in changes:
        file.write_bytes(codec.encode({**found, **change}))
        try:
            assert not replay.run(file).alike
        except replay.ReplayError as error:
            assert "foreign.replay" in str(error)
    assert not touched.exists()
    assert command("replays", str(tmp_path)).stdout.startswith("foreign\t")


def command(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "envhub", *words]
    return subprocess.run(line, capture_output=True, text=True, input=stdin, timeout=60, check=False)


@pytest.mark.long
def test_commands_list_replays_and_run_them() -> None:
    failure = failed(None, "exit")
    written_replay(failure.replay)
    rows = [line.split("\t") for line in command("replays").stdout.splitlines()]
    (row,) = (row for row in rows if row[0] == failure.replay)
    assert row[2] == "ended by status 3"
    ran = command("replay", failure.replay)
    assert (ran.returncode, ran.stdout.startswith("failed alike: ended by status 3 at step ")) == (0, True)
    assert ran.stderr.startswith(f"runs brittle:Brittle with {sys.executable} in {os.getcwd()}, modules from ")
    debugged = command("replay", failure.replay, "--pdb", stdin="print('here', self.steps)\nquit\n")
    assert "here 0" in debugged.stdout or "here" in debugged.stdout
    left = command("replay", failure.replay, "--pdb", stdin="quit\n")
    assert left.returncode == 0 and "where the debugger was left" in left.stdout, left
    assert "--pdb stops" in command("replay", failure.replay, "--until", "1").stderr
    assert command("replay", "nothing-1").returncode == 2


@pytest.mark.long
def test_file_from_elsewhere_is_run_only_if_it_is_trusted(tmp_path: Path) -> None:
    failure = failed(None, "exit")
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
    options = "--replays", str(tmp_path / "kept"), "--replays-bytes-max", "0"
    with serve(tmp_path, "brittle=brittle:Brittle", *options) as hub, made(hub.tcp, "exit") as envs:
        envs.reset(seed=3)
        (failure,) = failures(envs, 1)
        assert failure.replay == ""
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("env", [pytest.param("CartPole-v1", marks=pytest.mark.long), "Blackjack-v1"])
def test_env_that_was_killed_does_not_fail_again(env: str) -> None:
    wrapped = copy.deepcopy(gym.spec(env))  # which is the one that is registered
    wrapped.additional_wrappers = (gym.wrappers.TimeLimit.wrapper_spec(max_episode_steps=15),)
    with contextlib.closing(envhub.make_vec(wrapped, 2, num_workers=2)) as envs:
        envs.reset(seed=3)
        rng = np.random.default_rng(1)
        for _ in range(50):
            envs.step(np.array([rng.integers(0, 2)] * 2))
        before = set(files_in(FOLDER))
        for worker in worker_processes(private_hub().pid):
            worker.kill()

        def new() -> list[Path]:
            return [path for path in set(files_in(FOLDER)) - before if path.name.startswith("env-")]

        assert wait_until(lambda: len(new()) >= 2)
    for path in new():
        assert calls_of(path) == ["reset", *["step"] * 50]
        assert replay.run(path).text == "did not fail; it ended by SIGKILL at step 50 before"


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
    assert token[8:16] not in path.name  # for who knows the token has the session; its name is no secret
    assert calls_of(path).count("step") == 11  # the steps before, too
    assert replay.run(path).alike


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
