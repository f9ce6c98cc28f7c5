"""Simulators that take long to make, or that take more and more memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import sims
import test_placement
from combinations import each_value
from envhub_server.ipc.process_marks import memory_bytes
from hubs import LANES, kill_worker, wait_until, worker_pids, worker_processes

import envhub

MIB = 1 << 20
MEMORY_MAX = 400 * MIB  # a worker has less than half of it before it hoards anything
OVERRUN_S = 60.0  # a process that hoards for an env has to start first


def make(kind: Any, num_envs: int, address: str | None, **options: Any) -> envhub.HubVectorEnv:
    """This env of ``sims``: by factory from a private hub, by name from a served one."""
    if address is None:
        arguments = options.pop("env_kwargs", {})
        return envhub.make_vec([lambda: kind(**arguments)] * num_envs, **options)
    return envhub.make_vec(kind.__name__.lower(), num_envs, hub=address, **options)


def step_until_failure(envs: envhub.HubVectorEnv, actions: list[int]) -> tuple[np.ndarray, Any]:
    """Step with these actions and then 0 until an env is truncated; returns what it showed last, and failures."""
    end_s = time.monotonic() + OVERRUN_S
    while time.monotonic() < end_s:
        observations, _, _, truncations, infos = envs.step(actions)
        if truncations.any():
            return observations, infos["env_failure"]
        actions = [0] * envs.num_envs
    raise AssertionError("no env was truncated")


@pytest.mark.long
@pytest.mark.parametrize(
    ("address", "by"), each_value(LANES, ["itself", "by_child", "by_daemon"]), indirect=["address"]
)
def test_worker_with_too_much_memory_is_a_truncation_that_says_so(address: str | None, by: str) -> None:
    arguments = {} if by == "itself" else {by: True}
    with closing(make(sims.Hoarder, 2, address, num_workers=2, memory_max=MEMORY_MAX, env_kwargs=arguments)) as envs:
        envs.reset()
        envs.step([50, 100])
        observations, failures = step_until_failure(envs, [0, 500])
        assert failures[0] is None and failures[1].cause == "memory"
        assert f"more than memory_max={MEMORY_MAX} bytes" in failures[1].message
        pid = observations[0, 1]
        observations, *_ = envs.step([0, 0])
        assert observations[1, 0] == 0 and observations[0, 1] == pid  # the one begins again, the other goes on


def noted(path: Path, count: int) -> list[int]:
    """The processes that have begun to make an env, once there are so many."""
    assert wait_until(lambda: len(path.read_text().splitlines()) >= count)
    return [int(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_lost_env_is_back_without_another_being_made(address: str | None, tmp_path: Path) -> None:
    notes, permits = tmp_path / "notes", tmp_path / "permits"
    permits.write_bytes(bytes(2))
    arguments = {"notes": str(notes), "permits": str(permits)}
    with closing(make(sims.SlowToMake, 2, address, num_workers=2, spares=1, env_kwargs=arguments)) as envs:
        envs.reset()
        spare, lost = 2, 1
        for _ in range(2):
            pids = envs.step([0, 0])[0][:, 1]
            begun = noted(notes, spare + 1)
            kill_worker(int(pids[lost]))  # while the spare makes its env
            _, _, _, truncations, infos = envs.step([0, 0])
            assert truncations.tolist() == [row == lost for row in range(2)]
            assert infos["env_failure"][lost].cause == "crash"
            noted(notes, spare + 2)  # the killed worker's next process makes an env, too
            permits.write_bytes(bytes(spare + 1))
            observations = envs.step([0, 0])[0]
            assert observations[lost].tolist() == [0, begun[spare]] and observations[1 - lost, 1] == pids[1 - lost]
            spare, lost = spare + 1, 1 - lost


def test_spare_has_the_device_of_the_worker_whose_place_it_takes() -> None:
    with closing(envhub.make_vec(test_placement.Placed, 5, num_workers=2, gpus=[0, 1], spares=2)) as envs:
        places, devices = envs.call("environment", "ENVHUB_ENV_INDICES"), envs.call("device")
        assert places == ("0,2,4", "1,3", "0,2,4", "1,3", "0,2,4") and devices[1] == ["1"] * 3
        envs.reset()
        assert wait_until(lambda: len(worker_processes(os.getpid())) == 4)
        for lost in (1, 0, 1, 0):
            kill_worker(envs.call("pid")[lost])
            assert envs.call("environment", "ENVHUB_ENV_INDICES") == places and envs.call("device") == devices
            envs.reset()


def step_until_recycled(envs: envhub.HubVectorEnv, length: int, processes: int) -> None:
    """Step ``Leaky`` envs until each has had so many processes: no episode is cut short, and no step is left out."""
    pids: list[set[int]] = [set() for _ in range(envs.num_envs)]
    last, end_s = envs.reset(seed=1)[0][:, 0], time.monotonic() + 60
    while min(map(len, pids)) < processes:
        assert time.monotonic() < end_s
        observations, rewards, terminations, truncations, infos = envs.step([1] * envs.num_envs)
        assert not truncations.any() and "env_failure" not in infos
        counts, reset = observations[:, 0], last == length
        assert counts.tolist() == np.where(reset, 0, last + 1).tolist()
        assert rewards.tolist() == np.where(reset, 0, 1).tolist()
        assert terminations.tolist() == (counts == length).tolist()
        last = counts
        for row, pid in enumerate(observations[:, 1]):
            pids[row].add(int(pid))


def test_leaking_env_is_recycled_and_nothing_is_seen_of_it(address: str | None) -> None:
    with closing(make(sims.Leaky, 2, address, num_workers=2, recycle={"episodes": 10})) as envs:
        step_until_recycled(envs, length=5, processes=3)
        if address is not None:
            with envhub.connect(address) as client:
                (session,) = (each for each in client.sessions() if each["env"] == "leaky")
                assert session["restarts"] == 0 and session["recycled"] >= 4


@pytest.mark.long
def test_worker_is_recycled_that_has_much_memory_or_is_old() -> None:
    for recycle in ({"memory_bytes": 200 * MIB}, {"age_s": 0.5}):
        with closing(envhub.make_vec(partial(sims.Leaky, 5, 2), recycle=recycle)) as envs:
            step_until_recycled(envs, length=5, processes=3)


def test_env_that_is_reset_within_a_step_is_cut_when_it_is_recycled(address: str | None) -> None:
    how = {"num_workers": 2, "recycle": {"episodes": 10}, "autoreset_mode": "SameStep"}
    with closing(make(sims.Leaky, 2, address, **how)) as envs:
        envs.reset(seed=1)
        cuts, was_cut, end_s = np.zeros(2, int), np.zeros(2, bool), time.monotonic() + 60
        while cuts.min() < 2 and time.monotonic() < end_s:
            observations, rewards, terminations, truncations, infos = envs.step([1, 1])
            assert not (terminations & truncations).any() and not (observations[was_cut, 0]).any()
            assert rewards.tolist() == (~truncations & ~was_cut).astype(int).tolist()
            causes = [infos["env_failure"][row].cause for row in np.flatnonzero(truncations)]
            assert causes == ["recycle"] * len(causes)
            cuts, was_cut = cuts + truncations, truncations
        assert cuts.min() >= 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("lane", "recycle", "steps"),
    [
        ("auto", {"episodes": 40}, 600),
        pytest.param("wire", {"episodes": 40}, 1200, marks=pytest.mark.chaos),
        pytest.param("auto", {"memory_bytes": 200 * MIB}, 1200, marks=pytest.mark.chaos),
    ],
)
def test_several_envs_of_a_worker_are_cut_when_it_is_recycled(lane: str, recycle: dict[str, float], steps: int) -> None:
    """Eight envs whose episodes have 7 to 35 steps leak 2 MiB in each, which is 1 MiB a step."""
    factories = [partial(sims.Leaky, 7 + 4 * number, 2) for number in range(8)]
    lengths = np.array([7 + 4 * number for number in range(8)])
    with closing(envhub.make_vec(factories, num_workers=1, recycle=recycle, lane=lane)) as envs:
        last, ended = envs.reset(seed=1)[0][:, 0], np.zeros(8, bool)
        pids, cuts, begun_s, step_s = set(), 0, time.monotonic(), 0.002
        first_bytes, most_bytes = memory_bytes(envs.call("pid")[0]), 0
        alone = len(worker_processes(os.getpid()))
        end_s, enough = time.monotonic() + 90, 1 + steps // 600
        for step in itertools.count():
            if step >= steps and (len(pids) >= enough or time.monotonic() > end_s):
                break
            observations, _, terminations, truncations, infos = envs.step([1] * 8)
            expected = np.where(truncations, last, np.where(ended, 0, last + 1))
            assert observations[:, 0].tolist() == expected.tolist()
            assert terminations.tolist() == (~truncations & (expected == lengths) & ~ended).tolist()
            last, ended = expected, terminations | truncations
            if truncations.any():
                cuts += 1
                failures = [failure for failure in infos["env_failure"] if failure]
                assert len(failures) == truncations.sum()
                assert {failure.cause for failure in failures} == {"recycle"}
            pids.add(int(observations[0, 1]))
            if time.monotonic() > begun_s + 0.05:
                begun_s = time.monotonic()
                grown_bytes = memory_bytes(int(observations[0, 1])) - first_bytes
                most_bytes = max(most_bytes, grown_bytes)
                # A busy machine takes seconds to make a spare and its envs; meanwhile the envs leak more slowly.
                has_successor = len(worker_processes(os.getpid())) > alone
                step_s = 0.05 if grown_bytes > (500 if has_successor else 300) * MIB else 0.002
            time.sleep(step_s)  # a simulator's
        assert len(pids) >= enough and cuts >= len(pids) - 1
        assert most_bytes < 600 * MIB  # also of what is leaked while a spare is made


@pytest.mark.long
def test_native_vector_env_is_recycled_as_a_whole_at_last() -> None:
    with closing(envhub.make_vec("CartPole-v1", 8, vector=True, recycle={"episodes": 30})) as envs:
        envs.reset(seed=1)
        envs.action_space.seed(1)
        before = worker_pids()
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            _, _, _, truncations, infos = envs.step(envs.action_space.sample())
            if truncations.any():
                break
        assert truncations.all() and {failure.cause for failure in infos["env_failure"]} == {"recycle"}
        assert (np.abs(envs.step(envs.action_space.sample())[0]) <= 0.05).all()  # they begin again
        assert wait_until(lambda: worker_pids() != before)


class Words(sims.Leaky):
    """Its actions are texts of numbers, which it observes."""

    action_space = gymnasium.spaces.Text(9)
    observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float64)

    def reset(self, **how: Any) -> Any:
        return np.zeros(1), super().reset(**how)[1]

    def step(self, action: str) -> Any:
        _, *results = super().step(1)
        return np.array([float(action)]), *results


@pytest.mark.long
@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_no_action_that_travels_out_of_band_is_taken_twice_when_a_worker_is_recycled(lane: str) -> None:
    with closing(envhub.make_vec(partial(Words, 5), recycle={"episodes": 3}, lane=lane)) as envs:
        envs.reset(seed=1)
        pids, numbers, has_ended = {envs.call("pid")}, itertools.count(1), False

        def recycled() -> bool:
            nonlocal has_ended
            for number in itertools.islice(numbers, 100):
                observations, _, terminations, _, _ = envs.step((str(number),))
                assert observations[0].tolist() == [0 if has_ended else number]
                has_ended = terminations[0]
            pids.add(envs.call("pid"))
            return len(pids) > 2

        assert wait_until(recycled)


def test_env_that_its_program_resets_is_recycled_at_an_episodes_end() -> None:
    with closing(envhub.make(partial(sims.Leaky, 5), recycle={"episodes": 3})) as env:
        pids, end_s = set(), time.monotonic() + 30
        while len(pids) < 4 and time.monotonic() < end_s:
            observation, _ = env.reset()
            for count in range(1, 6):
                observation, _, terminated, truncated, info = env.step(0)
                assert (observation[0], truncated, "env_failure" in info) == (count, False, False)
            assert terminated
            pids.add(int(observation[1]))
        assert len(pids) >= 4


@pytest.mark.long
def test_workers_that_are_killed_while_they_are_recycled_lose_an_episode_and_no_more(address: str | None) -> None:
    options = {"num_workers": 2, "recycle": {"episodes": 4}, "restarts_max": 1000, "spares": 1}
    with closing(make(sims.Leaky, 2, address, **options)) as envs:
        observations, _ = envs.reset(seed=1)
        rng, kills, truncated, lost = np.random.default_rng(7), 0, 0, np.zeros(2, bool)
        for step in range(1500):  # eight are killed: after ten in a short time a session is given up
            if step % 200 == 50:
                with contextlib.suppress(ProcessLookupError):  # it may just have been recycled
                    os.kill(int(observations[rng.integers(2), 1]), signal.SIGKILL)
                    kills += 1
            last = observations[:, 0]
            observations, _, _, truncations, _ = envs.step([0, 0])
            truncated += int(truncations.sum())
            expected = np.where(truncations, last, np.where((last == 5) | lost, 0, last + 1))
            assert observations[:, 0].tolist() == expected.tolist()
            lost = truncations
        assert 0 < truncated <= kills


@pytest.mark.parametrize("recycle", [{"episode": 3}, {}, 3, {"episodes": 1.5}, {"age_s": -1}, {"memory_bytes": "1GB"}])
def test_recycle_says_when(recycle: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="recycle"):
        envhub.make_vec(sims.Leaky, recycle=recycle)


@pytest.mark.parametrize("value", [-1, 1.5, "1GB", True])
def test_memory_max_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="memory_max must be a number of bytes"):
        envhub.make_vec(sims.Hoarder, memory_max=value)
