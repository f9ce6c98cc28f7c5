"""What goes wrong is told at once, to the one it concerns, and costs nobody else anything."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sims
from hubs import ServedHub, stopped, wait_until, worker_processes

import envhub

TELL_S = 10.0  # "at once", with room for a slow machine; what hangs does so for a minute at least
CLOSE_S = 30.0  # likewise, where envs would have 60 s to close


def make(name: str, num_envs: int, address: str | None, **options: Any) -> envhub.HubVectorEnv:
    """The env of ``sims`` by name from a served hub, by factory from a private one."""
    if address is None:
        return envhub.make_vec([getattr(sims, name)] * num_envs, **options)
    return envhub.make_vec(name, num_envs, hub=address, **options)


def actions(*values: int) -> np.ndarray:
    return np.array(values)


# --- exceptions of env code -------------------------------------------------------------------------------------------


def test_exception_in_step_is_raised_as_itself_and_reset_goes_on(address: str | None) -> None:
    envs = make("naughty", 3, address, num_workers=2)
    envs.reset()
    with pytest.raises(ValueError, match="one is not allowed") as caught:
        envs.step(actions(0, 0, 1))
    cause = caught.value.__cause__
    assert isinstance(cause, envhub.EnvRaised) and cause.env_index == 2 and cause.worker == 0
    assert 'raise ValueError("one is not allowed")' in cause.remote_traceback
    observations, _ = envs.reset()
    assert observations[:, 0].tolist() == [0, 0, 0]
    assert envs.step(actions(0, 7, 0))[1].tolist() == [0, 7, 0]
    envs.close()


def test_exception_that_cannot_be_rebuilt_is_described_in_full(hub: ServedHub) -> None:
    envs = make("naughty", 2, hub.tcp)
    envs.reset()
    sys.modules.pop("nowhere", None)
    with pytest.raises(sims.TwoPartError) as same:  # importable here, with plain arguments: made again
        envs.step(actions(2, 0))
    assert same.value.code == 7
    envs.close()
    saved = sims.TwoPartError
    del sims.TwoPartError
    try:
        envs = make("naughty", 2, hub.tcp)
        envs.reset()
        with pytest.raises(envhub.EnvRaised, match="TwoPartError") as caught:
            envs.step(actions(2, 0))
        assert caught.value.env_index == 0 and "two is worse" in caught.value.remote_message
        assert pickle.loads(pickle.dumps(caught.value)).remote_message == caught.value.remote_message
        envs.close()
    finally:
        sims.TwoPartError = saved  # type: ignore[misc]


def test_exception_about_a_file_is_raised_as_itself(address: str | None) -> None:
    envs = make("naughty", 2, address)
    with pytest.raises(FileNotFoundError, match="/no/such/file") as caught:
        envs.call("read_file")
    assert caught.value.filename == "/no/such/file"
    with pytest.raises(envhub.EnvRaised, match="Mute") as told:
        envs.call("fail_mutely")
    assert told.value.env_index == 0
    envs.close()


def test_exception_in_reset_is_raised_and_the_next_reset_works(address: str | None) -> None:
    envs = make("bad_reset", 2, address)
    with pytest.raises(KeyError, match="no reset today"):
        envs.reset(options={"fail": True})
    observations, infos = envs.reset(options={"fail": False})
    assert observations.shape == (2, 2) and infos == {}
    envs.close()


def test_exception_in_a_call_breaks_nothing(address: str | None) -> None:
    envs = make("naughty", 3, address, num_workers=3)
    envs.reset()
    with pytest.raises(AttributeError, match="typo"):
        envs.get_attr("typo")
    with pytest.raises(RuntimeError, match="called in vain"):
        envs.call("fail")
    with pytest.raises(ValueError, match="use `step` directly"):
        envs.call("step", 1)
    with pytest.raises(TypeError):
        envs.call("add")
    assert envs.call("add", 1, right=2) == (3, 3, 3)
    envs.set_attr("note", ["a", "b", "c"])
    assert envs.get_attr("note") == ("a", "b", "c")
    envs.set_attr("note", 5)
    assert envs.get_attr("note") == (5, 5, 5)
    with pytest.raises(ValueError, match="length equal to the number of environments"):
        envs.set_attr("note", [1])
    assert envs.step(actions(0, 0, 0))[0][:, 0].tolist() == [1, 1, 1]
    envs.close()


def test_exception_in_close_is_logged_after_everything_has_ended(
    hub: ServedHub, caplog: pytest.LogCaptureFixture
) -> None:
    envs = make("bad_close", 2, hub.ipc)
    envs.reset()
    envs.close()
    assert envs.closed and "raised OSError: the door is stuck" in caplog.text
    envs.close()
    assert wait_until(lambda: not hub.workers())


def test_exception_in_a_factory_is_raised_and_nothing_is_left(address: str | None) -> None:
    with pytest.raises(ZeroDivisionError, match="no such world") as caught:
        make("never_made", 4, address, num_workers=2)
    assert isinstance(caught.value.__cause__, envhub.EnvRaised) and caught.value.__cause__.env_index in range(4)


def test_module_that_a_factory_lacks_is_named(hub: ServedHub) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        envhub.make_vec("needy", 2, hub=hub.tcp)
    assert wait_until(lambda: not hub.workers())


# --- processes that end -----------------------------------------------------------------------------------------------


def test_death_of_a_worker_goes_unnoticed_by_other_sessions(hub: ServedHub) -> None:
    dying, living = make("naughty", 2, hub.tcp, on_crash="raise"), make("counter", 2, hub.ipc)
    dying.reset()
    living.reset()
    living.step_async(actions(1, 1))
    with pytest.raises(envhub.WorkerDied):
        dying.step(actions(3, 3))
    assert living.step_wait()[0][:, 0].tolist() == [1, 1]
    for count in range(2, 50):
        assert living.step(actions(1, 1))[0][:, 0].tolist() == [count, count]
    dying.close()
    living.close()


@pytest.mark.filterwarnings("ignore:.*while waiting for a pending call")
def test_terminating_does_not_wait_for_a_step_that_hangs(hub: ServedHub) -> None:
    envs = make("naughty", 2, hub.tcp, close_timeout=60.0)
    envs.reset()
    envs.step_async(actions(0, 8))
    begun = time.monotonic()
    envs.close(terminate=True)
    assert wait_until(lambda: not hub.workers()) and time.monotonic() - begun < CLOSE_S


@pytest.mark.filterwarnings("ignore:.*while waiting for a pending call")
def test_session_ends_though_its_last_step_failed(hub: ServedHub) -> None:
    for last, expected in ((1, ValueError), (3, envhub.WorkerDied)):
        envs = make("naughty", 2, hub.tcp, on_crash="raise")
        envs.reset()
        envs.step_async(actions(last, 0))
        with contextlib.suppress(expected):
            envs.close()
        assert envs.closed and wait_until(lambda: not hub.workers(), TELL_S)
        with envhub.connect(hub.tcp) as client:
            assert wait_until(lambda: not client.sessions(), TELL_S)


def test_session_that_its_client_cannot_use_is_ended(hub: ServedHub) -> None:
    wrong = gym.spaces.Box(0, 1, (3,))
    with pytest.raises(RuntimeError, match="do not share a common shape"):
        make("counter", 2, hub.tcp, observation_mode=(wrong, wrong))
    assert wait_until(lambda: not hub.workers(), TELL_S)


def test_workers_that_are_born_while_the_make_fails_end_too() -> None:
    def sleep() -> gym.Env[Any, Any]:
        time.sleep(60)
        raise AssertionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            envhub.make_vec([lambda: 1 / 0, *[sleep] * 15], num_workers=16)  # type: ignore[list-item, return-value]
    assert wait_until(lambda: not worker_processes(os.getpid()), TELL_S)


@pytest.mark.long
def test_request_that_is_too_large_is_refused_before_it_is_sent(hub: ServedHub) -> None:
    envs = make("counter", 2, hub.tcp)
    with pytest.raises(envhub.RequestRefused, match="message_bytes_max=67108864"):
        envs.set_attr("note", bytes(1 << 26))
    assert envs.reset()[0].shape == (2, 2)
    envs.close()
    large = np.zeros(9 << 20)  # 72 MiB
    private = envhub.make_vec(lambda: sims.Counter(large.size), 1)
    assert private.get_attr("length") == (large.size,)
    private.close()


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_step_that_timed_out_can_be_waited_for_again(address: str | None) -> None:
    envs = make("naughty", 2, address)
    envs.reset()
    with stopped(*{*envs.call("pid")}):
        envs.step_async(actions(6, 9))
        with pytest.raises(multiprocessing.TimeoutError) as caught:
            envs.step_wait(timeout=0.02)
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(envhub.SessionBusy, match="pending call to `step`"):
            envs.reset()
    assert envs.step_wait()[1].tolist() == [6, 9]
    assert envs.step(actions(7, 9))[1].tolist() == [7, 9]
    with pytest.raises(gym.error.NoAsyncCallError):
        envs.step_wait()
    envs.close()


def test_wrong_actions_are_refused_before_any_env_moves(address: str | None) -> None:
    envs = make("counter", 3, address)
    envs.reset()
    for wrong in ([1, 2], np.zeros(4, int), np.zeros((3, 2), int), [[1], [2, 3], []]):
        with pytest.raises(ValueError, match="no env has moved"):
            envs.step(wrong)
    with pytest.raises(TypeError):
        envs.step(1)
    assert envs.step([0, 0, 0])[0][:, 0].tolist() == [1, 1, 1]
    envs.close()


def test_closed_envs_refuse_everything_but_close(address: str | None) -> None:
    envs = make("counter", 2, address)
    envs.close()
    envs.close()
    for attempt in (envs.reset, lambda: envs.step([0, 0]), lambda: envs.call("pid"), envs.step_wait):
        with pytest.raises(gym.error.ClosedEnvironmentError):
            attempt()
    assert envs.num_envs == 2 and envs.closed


def test_client_used_after_a_fork_refuses_clearly() -> None:
    envs = make("counter", 2, None)
    envs.reset()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            envs.step([0, 0])
        except envhub.Forked:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert envs.step([0, 0])[0][:, 0].tolist() == [1, 1]
    envs.close()


def test_slow_session_does_not_hold_up_another(hub: ServedHub) -> None:
    slow, quick = make("naughty", 2, hub.tcp), make("counter", 2, hub.tcp)
    slow.reset()
    quick.reset()
    with stopped(*{*slow.call("pid")}):
        slow.step_async(actions(0, 0))
        for _ in range(5):
            quick.step(actions(0, 0))
        with pytest.raises(TimeoutError):
            slow.step_wait(0)  # the other session made five steps meanwhile
    slow.step_wait()
    slow.close()
    quick.close()
