"""Attributes that were set are set again on the envs that take the place of others."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import odd_sims
import pytest
import sims
from hubs import kill_worker, serve, worker_processes
from test_hub_loss import kill_private_hub

import envhub

PATIENCE_S = 30.0


def test_env_that_is_made_again_has_the_attributes_of_the_one_before() -> None:
    with closing(envhub.make_vec([sims.Naughty] * 2, num_workers=2, on_exception="truncate")) as envs:
        envs.reset(seed=1)
        envs.set_attr("note", ["first", "second"])
        envs.set_attr("note", "third", env_ids=[1])
        for action in (1, 3):  # made again in its process, and in another
            assert envs.step([0, action])[3].tolist() == [False, True]
            envs.reset()
            assert envs.get_attr("note") == ("first", "third")


@pytest.mark.long
def test_attribute_that_cannot_be_set_again_is_logged_and_the_env_goes_on(tmp_path: Path) -> None:
    with serve(tmp_path, "late=odd_sims:Late") as hub, closing(envhub.make_vec("late", 1, hub=hub.ipc)) as envs:
        envs.reset()
        envs.step([0])
        envs.set_attr("level", 3)
        envs.set_attr("note", "kept")
        kill_worker(int(envs.step([0])[0][0, 1]))
        envs.reset()
        assert envs.get_attr("note") == ("kept",) and envs.get_attr("level") == (0,)
        assert "the attribute 'level' cannot be set again: builtins.RuntimeError: not stepped yet" in hub.log


def test_recycled_env_keeps_its_attributes() -> None:
    with closing(envhub.make_vec([sims.Leaky] * 2, num_workers=2, recycle={"episodes": 2})) as envs:
        envs.reset(seed=1)
        envs.set_attr("note", ["first", "second"])
        before, end_s = set(envs.call("pid")), time.monotonic() + PATIENCE_S
        while before & set(envs.call("pid")) and time.monotonic() < end_s:
            assert not envs.step([0, 0])[3].any()
        assert not before & set(envs.call("pid"))
        assert envs.get_attr("note") == ("first", "second")


@pytest.mark.long
def test_envs_on_the_hub_that_follows_have_the_attributes_of_those_before(caplog: pytest.LogCaptureFixture) -> None:
    with closing(envhub.make_vec([odd_sims.Late] * 2, on_hub_loss="recreate")) as envs:
        envs.reset()
        envs.step([0, 0])
        envs.set_attr("note", ["first", "second"])
        envs.set_attr("level", 3)
        envs.set_attr("note", "third", env_ids=[1])
        kill_private_hub()
        envs.reset()
        assert envs.get_attr("note") == ("first", "third") and envs.get_attr("level") == (0, 0)
        assert "the attribute 'level' cannot be set again: not stepped yet" in caplog.text


@pytest.mark.long
def test_exception_of_a_signal_handler_while_attributes_are_set_again_reaches_the_program() -> None:
    class Interrupted(Exception):
        pass

    def handle(*_: object) -> None:
        if armed:
            raise Interrupted

    armed = False
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with closing(envhub.make_vec([odd_sims.Signalling], on_hub_loss="recreate")) as envs:
            envs.reset(seed=1)
            envs.set_attr("program", os.getpid())
            kill_private_hub()
            armed = True
            with pytest.raises(Interrupted):
                envs.reset(seed=1)
            armed = False
            assert envs.reset(seed=1)[0].shape == (1, 2)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_native_vector_env_keeps_its_attributes() -> None:
    with closing(envhub.make_vec("CartPole-v1", 2, vector=True)) as envs:
        envs.reset(seed=1)
        envs.set_attr("gravity", 1.6)
        (worker,) = worker_processes(os.getpid())
        kill_worker(worker.pid)
        envs.reset()
        assert envs.get_attr("gravity") == (1.6, 1.6)
