"""An env's death is a truncation: what a trainer sees of envs that crash, hang or raise, on every lane."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faulty
import numpy as np
import psutil
import pytest
from combinations import each_value
from faulty import EXIT, HOLD_GIL, KILL, RAISE, SEGFAULT, SLEEP
from hubs import LANES, kill_worker, wait_until, worker_pids

import envhub

AT_ONCE_S = 10.0  # with room for a slow machine; the figures are in tests/benchmarks
HANG_S = 2.0  # after which an env is taken for one that hangs: an env that does not may be stalled for so long
MODES = ["NextStep", "SameStep", "Disabled"]


@contextlib.contextmanager
def made(address: str | None, num_envs: int = 3, name: str = "faulty", **options: Any) -> Iterator[envhub.HubVectorEnv]:
    """Envs of which each has a worker of its own, from a served hub by name, else by factory."""
    options = {"num_workers": num_envs, **options}
    if address is None:
        kwargs = {key: options.pop(key) for key in ("marks", "build_s", "fail_from", "wider_from") if key in options}
        envs = envhub.make_vec([functools.partial(getattr(faulty, name), **kwargs)] * num_envs, **options)
    else:
        envs = envhub.make_vec(name, num_envs, hub=address, **options)
    try:
        yield envs
    finally:
        envs.close()


def step(envs: envhub.HubVectorEnv, *actions: int) -> tuple[Any, ...]:
    return envs.step(np.array(actions))


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "action"), each_value(LANES, [KILL, SEGFAULT, EXIT]), indirect=["address"])
def test_env_that_dies_is_truncated_at_its_last_observation_and_the_others_go_on(
    address: str | None, action: int
) -> None:
    told = {KILL: ("SIGKILL", None), SEGFAULT: ("SIGSEGV", None), EXIT: ("", 7)}[action]
    with made(address) as envs:
        first = envs.reset(seed=3)[0]
        step(envs, 0, 0, 0)
        begun = time.monotonic()
        seen, rewards, terminations, truncations, infos = step(envs, 0, action, 0)
        assert time.monotonic() - begun < AT_ONCE_S
        assert seen[:, 0].tolist() == [2, 1, 2] and seen[:, 1].tolist() == first[:, 1].tolist()
        assert rewards.tolist() == [1, 0, 1] and not terminations.any()
        assert truncations.tolist() == [False, True, False]
        assert infos["_env_failure"].tolist() == infos["_invalid_transition"].tolist() == [False, True, False]
        assert infos["invalid_transition"].tolist() == [False, True, False]
        assert len(infos["env_failure"]) == 3 and infos["env_failure"][0] is None
        failure = infos["env_failure"][1]
        assert isinstance(failure, envhub.EnvFailure) and pickle.loads(pickle.dumps(failure)) == failure
        assert (failure["cause"], failure["restarts"]) == ("crash", 0)
        assert (failure["signal"], failure["exit_status"]) == told and "worker 1 (env 1)" in failure.message
        assert ("Segmentation fault" in failure.log_tail) == (action == SEGFAULT)
        seen, rewards, terminations, truncations, infos = step(envs, 0, 0, 0)
        assert seen[:, 0].tolist() == [3, 0, 3] and rewards.tolist() == [1, 0, 1]
        assert not truncations.any() and "env_failure" not in infos
        assert seen[1, 1] != first[1, 1]  # another incarnation's seed
        assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [4, 1, 4]


@pytest.mark.parametrize("mode", MODES)
def test_failing_step_and_the_one_after_it_obey_the_autoreset_mode(address: str | None, mode: str) -> None:
    with made(address, autoreset_mode=mode) as envs:
        envs.reset(seed=3)
        step(envs, 0, 0, 0)
        seen, _, _, truncations, infos = step(envs, KILL, 0, 0)
        assert seen[:, 0].tolist() == [1, 2, 2] and truncations.tolist() == [True, False, False]
        if mode == "SameStep":
            assert infos["final_obs"][0].tolist() == seen[0].tolist()
            assert infos["_final_obs"].tolist() == [True, False, False]
        else:
            assert "final_obs" not in infos
        if mode == "Disabled":
            for count in (3, 4):  # not before a reset is it stepped again
                seen, rewards, _, truncations, infos = step(envs, 0, 0, 0)
                assert seen[:, 0].tolist() == [1, count, count] and rewards.tolist() == [0, 1, 1]
                assert truncations.tolist() == infos["invalid_transition"].tolist() == [True, False, False]
            seen, _ = envs.reset(options={"reset_mask": np.array([True, False, False])})
            assert seen[:, 0].tolist() == [0, 4, 4]
            assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [1, 5, 5]
        else:
            assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [0, 3, 3]
            assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [1, 4, 4]


def test_all_envs_of_a_dead_worker_are_concerned_each_in_its_time(address: str | None) -> None:
    with made(address, 4, num_workers=2) as envs:
        envs.reset()
        # Env 0 had finished its step when env 2, of the same worker, died in its own.
        seen, _, _, truncations, _ = step(envs, 0, 0, KILL, 0)
        assert seen[:, 0].tolist() == [1, 1, 0, 1] and truncations.tolist() == [False, False, True, False]
        seen, _, _, truncations, infos = step(envs, 0, 0, 0, 0)
        assert seen[:, 0].tolist() == [1, 2, 0, 2] and truncations.tolist() == [True, False, False, False]
        assert infos["env_failure"][0].cause == "crash"
        assert step(envs, 0, 0, 0, 0)[0][:, 0].tolist() == [0, 3, 1, 3]


def test_env_that_dies_between_two_steps_is_truncated_by_the_next(address: str | None) -> None:
    with made(address) as envs:
        envs.reset()
        step(envs, 0, 0, 0)
        kill_worker(envs.call("pid")[2])
        seen, _, _, truncations, infos = step(envs, 0, 0, 0)
        assert seen[:, 0].tolist() == [2, 2, 1] and truncations.tolist() == [False, False, True]
        assert infos["env_failure"][2].signal == "SIGKILL"
        assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [3, 3, 0]


@pytest.mark.long
def test_new_incarnations_are_seeded_by_the_seed_and_their_number(address: str | None) -> None:
    def drawn() -> list[float]:
        with made(address) as envs:
            found = [float(envs.reset(seed=11)[0][1, 1])]
            for _ in range(2):
                step(envs, 0, KILL, 0)
                found.append(float(step(envs, 0, 0, 0)[0][1, 1]))
            return found

    first = drawn()
    assert len(set(first)) == 3 and drawn() == first


def test_reset_in_which_an_env_dies_waits_for_the_next_one(address: str | None) -> None:
    with made(address) as envs:
        envs.reset()
        pids = envs.call("pid")
        envs.reset_async(seed=4)
        seen, _ = envs.reset_wait()
        expected = seen[:, 1].tolist()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
        seen, _ = envs.reset(seed=4)
        assert seen[:, 0].tolist() == [0, 0, 0] and seen[:, 1].tolist() == expected
        assert wait_until(lambda: not psutil.pid_exists(pids[0]))  # the kill and the reset may cross
        assert envs.call("pid")[0] != pids[0]


def test_actions_out_of_band_are_executed_once_around_a_death(address: str | None) -> None:
    with made(address, 2, "spoken", num_workers=1) as envs:
        envs.reset()
        assert envs.step(("end", "0"))[2].tolist() == [True, False]
        before = worker_pids()
        kill_worker(envs.call("pid")[0])
        assert wait_until(lambda: worker_pids() - before)  # else the step may be posted before the hub takes the rows
        # The first env's episode had ended, so nothing of it was lost; the other's is cut short.
        seen, _, _, truncations, infos = envs.step(("0", "0"))
        assert seen[:, 0].tolist() == [0, 1] and truncations.tolist() == [False, True]
        assert infos["env_failure"][1].cause == "crash"
        assert envs.step(("0", "0"))[0][:, 0].tolist() == [1, 0]
        assert envs.step(("0", str(KILL)))[3].tolist() == [False, True]
        assert envs.step(("0", "0"))[3].tolist() == [True, False]


def test_parts_of_a_batch_go_on_around_an_env_that_dies(address: str | None) -> None:
    with made(address) as envs:
        envs.reset()
        envs.send(np.array([0, KILL, 0]))
        seen, _, _, truncations, infos, env_ids = envs.recv()
        assert env_ids.tolist() == [0, 1, 2] and seen[:, 0].tolist() == [1, 0, 1]
        assert truncations.tolist() == [False, True, False] and infos["env_failure"][1].cause == "crash"
        envs.send(np.array([0]), [1])
        envs.send(np.array([0]), [2])
        found = {}
        while len(found) < 2:
            seen, _, _, _, _, env_ids = envs.recv(1)
            found.update(zip(env_ids.tolist(), seen[:, 0].tolist(), strict=True))
        assert found == {1: 0, 2: 2}


# --- the policies -----------------------------------------------------------------------------------------------------


def test_crash_can_be_raised_and_the_session_goes_on(address: str | None) -> None:
    with made(address, on_crash="raise") as envs:
        envs.reset()
        with pytest.raises(envhub.WorkerDied, match=r"worker 0 \(env 0\) was ended by SIGKILL"):
            step(envs, KILL, 0, 0)
        assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [0, 2, 2]
        kill_worker(envs.call("pid")[1])
        with pytest.raises(envhub.WorkerDied, match="worker 1"):
            step(envs, 0, 0, 0)
        assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [2, 0, 4]


def test_exception_can_be_a_truncation_and_the_env_is_built_again(address: str | None) -> None:
    with made(address, on_exception="truncate") as envs:
        envs.reset()
        pids = envs.call("pid")
        seen, rewards, _, truncations, infos = step(envs, 0, RAISE, 0)
        assert seen[:, 0].tolist() == [1, 0, 1] and rewards.tolist() == [1, 0, 1]
        assert truncations.tolist() == [False, True, False]
        failure = infos["env_failure"][1]
        assert (failure.cause, failure.exception) == ("exception", "builtins.KeyError")
        assert "no such joint" in failure.message and 'raise KeyError("no such joint")' in failure.traceback
        assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [2, 0, 2]
        assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [3, 1, 3]
        assert envs.call("pid") == pids  # in the same process
        drawn = float(step(envs, 0, 0, 0)[0][1, 1])
        envs.reset(seed=11)
        step(envs, 0, RAISE, 0)
        assert float(step(envs, 0, 0, 0)[0][1, 1]) not in (drawn, float(envs.reset(seed=11)[0][1, 1]))
        with pytest.raises(envhub.RestartsExhausted, match="KeyError"):
            for _ in range(2000):  # who steps in the workers' own memory may be ahead of the hub, which counts
                step(envs, 0, RAISE, 0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"on_crash": "ignore"}, ValueError),
        ({"on_exception": "pass"}, ValueError),
        ({"restarts_max": -1}, ValueError),
        ({"restarts_max": 1.5}, TypeError),
        ({"step_timeout": float("inf")}, ValueError),
        ({"step_timeout": 0}, ValueError),
        ({"restart_wait": "soon"}, TypeError),
        ({"on_hub_loss": "ignore"}, ValueError),
        ({"reconnect_timeout": -1.0}, ValueError),
        ({"reconnect_timeout": float("nan")}, ValueError),
    ],
)
def test_options_that_make_no_sense_are_refused_here(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        envhub.make_vec("CartPole-v1", **options)


# --- hangs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "action"),
    [
        ("embedded", HOLD_GIL),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("embedded", SLEEP), ("tcp", SLEEP))),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("tcp", HOLD_GIL), ("ipc", HOLD_GIL))),
    ],
    indirect=["address"],
)
def test_env_that_hangs_is_ended_at_its_deadline_and_its_stack_is_shown(address: str | None, action: int) -> None:
    with made(address, step_timeout=HANG_S) as envs:
        envs.reset()
        step(envs, 0, 0, 0)
        begun = time.monotonic()
        seen, _, _, truncations, infos = step(envs, 0, 0, action)
        assert HANG_S - 0.1 < time.monotonic() - begun < HANG_S + AT_ONCE_S
        assert seen[:, 0].tolist() == [2, 2, 1] and truncations.tolist() == [False, False, True]
        failure = infos["env_failure"][2]
        assert failure.cause == "timeout"
        assert f"env 2 did not finish its step within step_timeout={HANG_S:g} s" in failure.message
        assert "faulty.py" in failure.traceback and "in act" in failure.traceback
        assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [3, 3, 0]


@pytest.mark.long
def test_first_step_has_the_time_of_the_making(address: str | None) -> None:
    with made(address, 1, step_timeout=0.3, init_timeout=3.0) as envs:  # one, which is made quickly
        envs.reset()
        begun = time.monotonic()
        _, _, _, truncations, infos = step(envs, SLEEP)
        assert time.monotonic() - begun > 2.9 and truncations[0]
        assert "init_timeout=3" in infos["env_failure"][0].message


@pytest.mark.long
def test_call_that_hangs_fails_and_the_session_goes_on(address: str | None) -> None:
    with made(address, call_timeout=0.5) as envs:
        envs.reset()
        step(envs, 0, 0, 0)
        with pytest.raises(envhub.EnvTimeout, match=r"a call within call_timeout=0\.5 s.*during a call"):
            envs.call("sleep", 3600)
        _, _, _, truncations, _ = step(envs, 0, 0, 0)
        assert truncations.all()
        assert step(envs, 0, 0, 0)[0][:, 0].tolist() == [0, 0, 0]


def test_env_that_dies_in_a_call_fails_it_and_the_session_goes_on(address: str | None) -> None:
    with made(address, 2) as envs:
        envs.reset()
        with pytest.raises(envhub.WorkerDied, match="during a call"):
            envs.call("die")
        assert envs.call("pid") and step(envs, 0, 0)[3].all()
        assert step(envs, 0, 0)[0][:, 0].tolist() == [0, 0]


@pytest.mark.long
def test_making_that_hangs_fails_and_names_the_env(tmp_path: Path) -> None:
    begun = time.monotonic()
    with (
        pytest.raises(envhub.EnvTimeout, match=r"env \d did not finish its making"),
        made(None, build_s=60, init_timeout=0.7),
    ):
        pass
    assert time.monotonic() - begun < 0.7 + AT_ONCE_S


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_env_that_dies_at_every_step_ends_in_one_clear_error_and_the_hub_lives(address: str | None) -> None:
    with made(address) as envs:
        envs.reset()
        with pytest.raises(envhub.RestartsExhausted, match="it failed 6 times and is not started again"):
            for _ in range(50):
                step(envs, 0, KILL, 0)
        with pytest.raises(envhub.RestartsExhausted):
            envs.reset()
    with made(address, 1) as envs:
        envs.reset()


@pytest.mark.long
def test_step_waits_for_the_new_env_only_so_long_and_is_then_truncated_again(tmp_path: Path) -> None:
    with made(None, 2, marks=str(tmp_path), build_s=10.0, restart_wait=0.4, restarts_max=1) as envs:
        envs.reset()
        step(envs, KILL, 0)
        begun = time.monotonic()
        seen, rewards, _, truncations, infos = step(envs, 0, 0)
        assert 0.3 < time.monotonic() - begun < 9
        assert seen[:, 0].tolist() == [0, 2] and rewards.tolist() == [0, 1] and truncations.tolist() == [True, False]
        assert infos["invalid_transition"].tolist() == [True, False]
        assert wait_until(lambda: step(envs, 0, 0)[3].tolist() == [False, False], 60)
        assert step(envs, 0, 0)[0][0, 0] == 1


def test_env_that_comes_back_with_another_space_is_given_up(tmp_path: Path) -> None:
    with made(None, 1, marks=str(tmp_path), wider_from=1) as envs:
        envs.reset()
        step(envs, KILL)
        with pytest.raises(envhub.RestartsExhausted, match="space"):
            for _ in range(50):
                step(envs, 0)
