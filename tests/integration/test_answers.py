"""Every request gets its own answer, whatever becomes of the worker, its descriptors and its forked children."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
from combinations import each_value
from hubs import ServedHub, serve, wait_until
from unruly import CALLS, FORKS_THAT_COME_BACK

import envhub

LANES = ["ipc", "tcp"]
PATIENCE_S = 20.0
LATE_S = 10.0  # the deadline of everything here; what is answered by it is not answered in time


@pytest.fixture(scope="module")
def unruly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), "unruly=unruly:unruly") as served:
        yield served


@contextmanager
def made(
    hub: ServedHub, lane: str, num_envs: int = 2, num_workers: int = 2, **options: Any
) -> Iterator[envhub.HubVectorEnv]:
    late = dict.fromkeys(("step_timeout", "reset_timeout", "call_timeout"), LATE_S)
    found = {"num_workers": num_workers, "on_timeout": "raise", **late, **options}
    envs = envhub.make_vec("unruly", num_envs, hub=getattr(hub, lane), **found)
    try:
        yield envs
    except BaseException:
        envs.close(terminate=True)  # what is under way may never end
        raise
    envs.close()


def wait_reset(envs: envhub.HubVectorEnv, **acts: str) -> Any:
    envs.reset_async(options={"acts": acts})
    return envs.reset_wait(timeout=PATIENCE_S)


def wait_step(envs: envhub.HubVectorEnv) -> Any:
    envs.step_async(np.zeros(envs.num_envs, np.int64))
    return envs.step_wait(timeout=PATIENCE_S)


def causes(infos: dict[str, Any]) -> list[str]:
    return [failure.cause if failure else "" for failure in infos.get("env_failure", [])]


def wait_for_end(observations: np.ndarray) -> None:
    """Wait until the hub has reaped the workers of these observations.

    One that had no CPU meanwhile still serves what its memory says, before it finds that it hears nobody.
    """
    pids = {*observations[:, 1].astype(int).tolist()}
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)))


# --- a batch that is complete is answered -----------------------------------------------------------------------------


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("act", ["die_before_the_bell", "close_all"])
@pytest.mark.parametrize("call", ["step", pytest.param("reset", marks=pytest.mark.long)])
def test_batch_is_answered_though_its_worker_ends_before_it_rings(
    unruly: ServedHub, lane: str, act: str, call: str
) -> None:
    with made(unruly, lane) as envs:
        observations, infos = wait_reset(envs, **{call: act})
        if call == "step":
            observations, _, _, truncations, infos = wait_step(envs)
            assert not truncations.any()
        assert observations[:, 0].tolist() == [int(call == "step")] * 2 and not infos
        wait_for_end(observations)
        assert causes(wait_step(envs)[4]) == ["crash", "crash"]
        assert wait_step(envs)[0][:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("lane", LANES)
def test_part_of_a_batch_is_answered_though_its_worker_ends_before_it_rings(unruly: ServedHub, lane: str) -> None:
    with made(unruly, lane) as envs:
        wait_reset(envs, step="die_before_the_bell")
        envs.send(np.zeros(1, np.int64), [1])
        observations, _, _, truncations, _, env_ids = envs.recv(timeout=PATIENCE_S)
        assert env_ids.tolist() == [1] and observations[:, 0].tolist() == [1] and not truncations.any()


@pytest.mark.long
@pytest.mark.parametrize("lane", LANES)
def test_bell_that_is_never_rung_is_not_waited_for(unruly: ServedHub, lane: str) -> None:
    with made(unruly, lane) as envs:
        wait_reset(envs, reset="never_ring")
        for steps in range(1, 4):
            observations, *_, infos = wait_step(envs)
            assert observations[:, 0].tolist() == [steps, steps] and not infos


@pytest.mark.parametrize("lane", LANES)
def test_worker_whose_descriptors_are_all_replaced_holds_nothing_up(unruly: ServedHub, lane: str) -> None:
    with made(unruly, lane) as envs:
        wait_reset(envs, step="replace_all")
        observations = wait_step(envs)[0]
        assert observations[:, 0].tolist() == [1, 1]
        wait_for_end(observations)
        assert causes(wait_step(envs)[4]) == ["crash", "crash"]
        assert wait_step(envs)[0][:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("call", ["init", "reset", "step"])
def test_env_that_closes_the_usual_descriptors_goes_on(unruly: ServedHub, lane: str, call: str) -> None:
    with made(unruly, lane, acts={call: "close_100"}) as envs:
        assert wait_reset(envs)[0][:, 0].tolist() == [0, 0]
        for steps in (1, 2, 3):
            observations, *_, infos = wait_step(envs)
            assert observations[:, 0].tolist() == [steps, steps] and not infos
        assert envs.call("echo", 7) == (7, 7)
        envs.call("act", "close_100")
        assert envs.call("echo", 8) == (8, 8)


def test_worker_whose_channel_was_closed_is_reported_as_such(unruly: ServedHub) -> None:
    with made(unruly, "tcp") as envs:
        wait_reset(envs)
        envs.call_some([0], "act", "close_all")
        failures = wait_step(envs)[4]["env_failure"]
        assert "exited with status 1" in failures[0]["message"]
    assert "Bad file descriptor" in unruly.log


@pytest.mark.parametrize("lane", LANES)
def test_worker_that_can_hear_nothing_any_more_is_replaced(unruly: ServedHub, lane: str) -> None:
    with made(unruly, lane) as envs:
        wait_reset(envs, step="close_sockets")
        wait_step(envs)
        assert wait_reset(envs)[0][:, 0].tolist() == [0, 0]  # and not only at its deadline, which would raise
        assert wait_step(envs)[0][:, 0].tolist() == [1, 1]


# --- only the worker speaks -------------------------------------------------------------------------------------------


def in_every_call(acts: Iterable[Any], calls: Iterable[str]) -> pytest.MarkDecorator:
    """Every act in every call on every lane; CI has the first in each call on one lane, and each in a step on one."""
    first, *_ = acts = list(acts)
    combined = itertools.product(LANES, acts, calls)
    few = {*((LANES[0], first, call) for call in calls), *((LANES[1], act, "step") for act in acts)}
    return pytest.mark.parametrize(
        ("lane", "act", "call"),
        [pytest.param(*each, marks=() if each in few else pytest.mark.chaos) for each in combined],
    )


@pytest.mark.parametrize(("lane", "act"), each_value(LANES, [*FORKS_THAT_COME_BACK, "fork_in_c"]))
@pytest.mark.parametrize(("num_envs", "num_workers"), [pytest.param(1, 1, marks=pytest.mark.chaos), (3, 2)])
def test_child_that_comes_back_from_a_call_answers_nothing(
    unruly: ServedHub, lane: str, act: str, num_envs: int, num_workers: int
) -> None:
    with made(unruly, lane, num_envs, num_workers) as envs:
        wait_reset(envs)
        for number in range(3):
            assert envs.call("act", act, ["first", number]) == (["first", number],) * num_envs
            assert envs.call("echo", number) == (number,) * num_envs
            assert wait_step(envs)[0][:, 0].tolist() == [number + 1] * num_envs
        assert {status != 0 for status in envs.call("found")} == {True}


@in_every_call(FORKS_THAT_COME_BACK, CALLS)
def test_messages_of_a_child_that_returns_from_any_call_are_not_read(
    unruly: ServedHub, lane: str, act: str, call: str
) -> None:
    with made(unruly, lane, 3, 2, acts={call: act}) as envs:
        pids = wait_reset(envs)[0][:, 1].tolist()
        for steps in (1, 2, 3):
            envs.step_async(np.array([3, 1, 2]))
            observations, rewards, _, truncations, infos = envs.step_wait(timeout=PATIENCE_S)
            assert observations.tolist() == [[steps, pid] for pid in pids] and rewards.tolist() == [3, 1, 2]
            assert not truncations.any() and not infos
            envs.set_attr("note", [steps, steps + 1, steps + 2])
            assert envs.get_attr("note") == (steps, steps + 1, steps + 2)
            assert [int(frame.max()) for frame in envs.render()] == [steps] * 3
            assert envs.call("echo", steps) == (steps,) * 3
        if call != "close":
            assert envs.call("found") == (1, 1, 1)  # each child has ended as told
    assert wait_until(lambda: not unruly.workers(), 10)


STATUSES = {"_exit": 4, "twice": 5, "subprocess": 6, "multiprocessing": 0}


@in_every_call(STATUSES, ["init", "reset", "step", "call"])
def test_child_that_ends_as_it_should_is_left_alone(unruly: ServedHub, lane: str, act: str, call: str) -> None:
    with made(unruly, lane, acts={call: act}) as envs:
        wait_reset(envs)
        assert wait_step(envs)[0][:, 0].tolist() == [1, 1]
        assert envs.call("echo", 3) == (3, 3)
        assert envs.call("found") == (STATUSES[act],) * 2


@pytest.mark.parametrize("lane", LANES)
def test_answer_to_another_request_is_dropped_and_logged(unruly: ServedHub, lane: str) -> None:
    before = len(unruly.log)
    with made(unruly, lane, 1, 1) as envs:
        wait_reset(envs, reset="fail_another_step")
        assert envs.call("act", "fail_another_step", "right") == ("right",)
        assert envs.call("echo", "next") == ("next",)
        wait_reset(envs, step="fail_another_step")
        assert wait_step(envs)[0][:, 0].tolist() == [1]
        assert envs.call("echo", "last") == ("last",)
        for kind in ("RowFailed", "RowInfo"):  # a client that drives has its results before the hub reads this
            assert wait_until(lambda kind=kind: f'"message": "{kind}"' in unruly.log[before:])
        assert '"stale_answer_dropped"' in unruly.log[before:]
