"""How many workers a session gets, where they run and how they wait, as its user wants it."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import sims
from envhub_server.session.building import first_workers
from hubs import kill_worker, serve, wait_until, worker_processes

import envhub

ALL_CPUS = sorted(os.sched_getaffinity(0))
CPUS = len(ALL_CPUS)


STEPS_TOLD = 40  # after which a worker has told what its envs change that its process shares


def step(envs: envhub.HubVectorEnv, times: int) -> list[int]:
    envs.reset(seed=1)
    for _ in range(times):
        observations = envs.step([1] * envs.num_envs)[0]
    return observations[:, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_env_that_factories_share_is_an_env_of_each_whatever_the_number_of_workers(num_workers: int) -> None:
    env = sims.Counter()
    factories = [lambda: env, lambda: gymnasium.Wrapper(env), lambda: env]
    with closing(envhub.make_vec(factories, num_workers=num_workers)) as envs:
        assert step(envs, 3) == [3, 3, 3]


def test_env_that_cannot_be_made_once_more_is_refused_where_it_would_be_two() -> None:
    with pytest.raises(ValueError, match="factory of env 1 returned an env that this process has already"):
        envhub.make_vec([lambda: vars(gymnasium).setdefault("only", sims.Counter())] * 2, num_workers=1)


def test_env_of_which_nothing_is_known_gets_a_process_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "envhub")
    with closing(envhub.make_vec([lambda: sims.Counter(length=12345)] * (2 * CPUS + 1))) as envs:
        assert envs.sizing == (2 * CPUS + 1, "a process per env: nothing is known of this env")
        assert len(set(envs.call("pid"))) == envs.num_workers == 2 * CPUS + 1
        assert step(envs, 3) == [3] * (2 * CPUS + 1)
    assert f"{2 * CPUS + 1} workers for {2 * CPUS + 1} envs: a process per env" in caplog.text


@pytest.mark.parametrize("make", [envhub.make_vec, envhub.AsyncVectorEnv])
def test_env_that_computes_in_its_process_gets_a_worker_per_cpu(make: Callable[[Any], envhub.HubVectorEnv]) -> None:
    with closing(make([lambda: gymnasium.make("CartPole-v1")] * (2 * CPUS + 1))) as envs:
        assert envs.num_workers == CPUS and "known to share a process well" in envs.sizing.reason
        envs.reset(seed=1)
        assert envs.step([1] * (2 * CPUS + 1))[0].shape == (2 * CPUS + 1, 4)


def test_env_whose_steps_are_very_cheap_has_fewer_workers_than_others() -> None:
    with closing(envhub.make_vec("CartPole-v1", 4)) as envs:
        assert envs.num_workers == first_workers("CartPole-v1", 4, CPUS) <= max(1, CPUS - 1)
        assert "its steps to be very cheap" in envs.sizing.reason


def test_no_env_is_made_or_stepped_to_learn_about_it(tmp_path: Path) -> None:
    made = tmp_path / "made"

    def factory() -> sims.Counter:
        with made.open("a") as file:
            file.write("x")
        return sims.Counter()

    with closing(envhub.make_vec([factory] * (CPUS + 3))) as envs:
        assert made.read_text() == "x" * (CPUS + 3)
        assert envs.call("count") == (0,) * (CPUS + 3)


@pytest.mark.parametrize("first_unknown", [1, 2 * CPUS])
def test_all_envs_are_asked_where_they_are_of_different_kinds(first_unknown: int) -> None:
    known, unknown = lambda: gymnasium.make("CartPole-v1"), lambda: Mine(gymnasium.make("CartPole-v1"))
    makes = [known if row < first_unknown else unknown for row in range(2 * CPUS + 1)]
    for _ in range(2):
        with closing(envhub.make_vec(makes)) as envs:
            step(envs, STEPS_TOLD)
            assert envs.num_workers == 2 * CPUS + 1


class Mine(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that might wait."""


@pytest.mark.long
def test_what_envs_change_that_their_process_shares_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with closing(envhub.make_vec([sims.Draws] * 4, num_workers=2)) as envs:
        envs.reset(seed=0)
        for _ in range(STEPS_TOLD):
            envs.step([0] * 4)
        assert wait_until(lambda: "numpy.random, which all envs of a process have in common" in caplog.text)
        envs.step([0] * 4)
    assert caplog.text.count("have in common") == 1
    caplog.clear()
    for options in ({"num_workers": 4}, {"one_per_process": True}):
        with closing(envhub.make_vec([sims.Draws] * 4, **options)) as envs:
            step(envs, STEPS_TOLD)
    assert "have in common" not in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("fails", ["raises", pytest.param("exits", marks=pytest.mark.long)])
def test_envs_of_which_a_process_can_have_one_are_refused_where_they_are_told_to_share_one(
    tmp_path: Path, fails: str
) -> None:
    num_envs = CPUS + 1
    file = tmp_path / "hub.toml"
    file.write_text('[envs.one]\nenv = "sims:OnePerProcess"\nshared_process = true\n')
    with serve(tmp_path, "--config", str(file), "--allow-arguments", "one=fails") as hub:
        with closing(envhub.make_vec("one", num_envs, hub=hub.tcp, fails=fails, one_per_process=True)) as envs:
            assert (envs.num_workers, step(envs, 3)) == (num_envs, [3] * num_envs)
        with pytest.raises((envhub.EnvHubError, RuntimeError), match=r"only one|while it built its envs"):
            envhub.make_vec("one", num_envs, hub=hub.tcp, fails=fails)


@pytest.mark.long
def test_operator_and_client_say_which_envs_share_a_process(tmp_path: Path) -> None:
    file = tmp_path / "hub.toml"
    file.write_text('[envs.CartPole-v1]\none_per_process = true\n[envs.counter]\nenv = "sims:counter"\n')
    with serve(tmp_path, "--config", str(file)) as hub:
        with closing(envhub.make_vec("CartPole-v1", CPUS + 2, hub=hub.tcp)) as envs:
            assert envs.sizing == (CPUS + 2, "a process per env: one_per_process")
        for refused in ({"shared_process": True}, {"num_workers": 2}):
            with pytest.raises(envhub.EnvHubError, match="a process"):
                envhub.make_vec("CartPole-v1", CPUS + 2, hub=hub.tcp, **refused)
        with closing(envhub.make_vec("counter", CPUS + 2, hub=hub.tcp, shared_process=True)) as envs:
            assert envs.sizing == (CPUS, "one per CPU: shared_process")
    file.write_text("[envs.CartPole-v1]\none_per_process = true\nshared_process = true\n")
    with pytest.raises(RuntimeError, match="exclude each other"), serve(tmp_path, "--config", str(file)):
        pass
    with pytest.raises(ValueError, match="one_per_process"):
        envhub.make_vec("CartPole-v1", 2, shared_process=True, one_per_process=True)


def test_envs_in_the_process_itself_are_those_of_sync_vector_env(address: str | None) -> None:
    with pytest.raises(ValueError, match=r"num_workers=0 hosts no env: .* use gymnasium.vector.SyncVectorEnv, whose"):
        envhub.make_vec("CartPole-v1", 2, hub=address, num_workers=0)


@pytest.mark.parametrize(
    ("keyword", "workers"), [("num_workers", 2), ("num_workers", np.int64(2)), ("max_concurrency", 2)]
)
def test_drop_in_takes_the_number_of_workers(keyword: str, workers: int) -> None:
    with closing(envhub.AsyncVectorEnv([sims.Counter] * 5, **{keyword: workers})) as envs:
        assert envs.sizing == (2, "told by num_workers=2")
    with pytest.raises(ValueError, match="give one"):
        envhub.AsyncVectorEnv([sims.Counter] * 5, max_concurrency=2, num_workers=2)


def test_pinned_worker_keeps_to_its_cpu_when_a_spare_takes_its_place() -> None:
    with closing(envhub.make_vec([sims.Counter] * 2, num_workers=2, pin=True, spares=1)) as envs:
        for lost in (1, 0, None):
            envs.reset()
            pids = envs.call("pid")
            assert [psutil.Process(pid).cpu_affinity() for pid in pids] == [[cpu] for cpu in (ALL_CPUS * 2)[:2]]
            if lost is not None:
                assert wait_until(lambda: len(worker_processes(os.getpid())) == 3)
                kill_worker(pids[lost])


class InGoneFolder(sims.Counter):
    """Works in a folder that it has removed."""

    def __init__(self) -> None:
        super().__init__()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)


def test_env_that_has_removed_its_folder_is_made_and_stepped() -> None:
    with closing(envhub.make_vec([InGoneFolder] * 2)) as envs:
        envs.reset()
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]


@pytest.mark.parametrize(
    "wrong", [{"spin_us": -1}, {"spin_us": 1001}, {"num_workers": "many"}, {"num_workers": -1}, {"num_workers": 1.5}]
)
def test_wrong_options_are_refused_here(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        envhub.make_vec("CartPole-v1", 2, **wrong)
