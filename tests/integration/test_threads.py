"""A vector env is used by one thread at a time: another one is refused, and neither waits for ever."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sims
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from hubs import ServedHub

import envhub
from envhub.vector_errors import SessionInUse

WAIT_S = 30.0  # for a thread that need not wait for anything
HAMMERED_S = 0.5
ENOUGH = 10  # results, and refusals, without which threads hammer on
THREADS = 4
SWITCH_S = 1e-5  # after which another thread runs
LANES = [
    "embedded",
    pytest.param("embedded by wire", marks=pytest.mark.long),
    "tcp",
    pytest.param("ipc", marks=pytest.mark.long),
]


@pytest.fixture(params=LANES)
def make(request: pytest.FixtureRequest) -> Callable[..., envhub.HubVectorEnv]:
    """Makes counters on one lane of one hub."""
    where, _, by_wire = request.param.partition(" by ")

    def made(num_envs: int, **kwargs: Any) -> envhub.HubVectorEnv:
        if where in ("tcp", "ipc"):
            hub: ServedHub = request.getfixturevalue("hub")
            return envhub.make_vec("counter", num_envs, hub=getattr(hub, where), num_workers=2, **kwargs)
        workers = 2
        lane = "wire" if by_wire else "auto"
        return envhub.make_vec([sims.Counter] * num_envs, num_workers=workers, lane=lane, **kwargs)

    return made


class Parked:
    """A call in a thread of its own, which is stopped at a method of an object that it comes by."""

    def __init__(self, call: Callable[[], Any], owner: Any, name: str) -> None:
        self.results: list[Any] = []
        self._call, self._real = call, getattr(owner, name)
        self._arrived, self._go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        setattr(owner, name, self._at)
        self._thread.start()
        assert self._arrived.wait(WAIT_S)

    def _run(self) -> None:
        try:
            self.results.append(self._call())
        except Exception as error:
            self.results.append(error)

    def _at(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is self._thread and not self._arrived.is_set():
            self._arrived.set()
            assert self._go.wait(WAIT_S)
        return self._real(*args, **kwargs)

    def go_on(self) -> Any:
        """What it returns or raises, once it was let go on."""
        self._go.set()
        self._thread.join(WAIT_S)
        assert self.results, "it waits for ever"
        return self.results[0]


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What the call returns or raises in another thread, which must not wait for ever."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert results, "it waits for ever"
    return results[0]


def test_of_two_threads_that_receive_one_is_refused_and_none_waits_for_ever(
    make: Callable[..., envhub.HubVectorEnv],
) -> None:
    with contextlib.closing(make(3)) as envs:
        envs.reset()
        envs.send([5, 6, 7])
        parked = Parked(envs.recv, envs._session.lane, "wait_rows")  # after it has counted what is under way
        assert isinstance(in_a_thread(envs.recv), (envhub.ConnectionInUse, envhub.SessionBusy))
        *_, env_ids = parked.go_on()
        assert env_ids.tolist() == [0, 1, 2]
        with pytest.raises(envhub.NothingPending):
            envs.recv()
        assert envs.step([0, 0, 0])[0][:, 0].tolist() == [2, 2, 2]


@pytest.mark.parametrize(("begin", "wait"), [("send", "recv"), ("step_async", "step_wait")])
def test_no_result_goes_to_two_threads(make: Callable[..., envhub.HubVectorEnv], begin: str, wait: str) -> None:
    with contextlib.closing(make(3)) as envs:
        envs.reset()
        getattr(envs, begin)([5, 6, 7])
        in_use, others = envs._session.in_use, []

        def release() -> None:  # and the other thread runs before this one goes on
            del in_use.release
            in_use.release()
            others.append(in_a_thread(getattr(envs, wait)))

        in_use.release = release  # type: ignore[method-assign]
        assert getattr(envs, wait)()[0].shape == (3, 2)
        assert isinstance(others[0], (SessionInUse, envhub.NothingPending))
        with pytest.raises(envhub.NothingPending):
            getattr(envs, wait)()


@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_what_a_thread_has_looked_at_is_not_changed_before_it_acts_on_it(lane: str, hub: ServedHub) -> None:
    calls: list[tuple[Callable[[], Any], str, str]] = [
        (lambda: envs.step([1, 1]), "lane", "begin_step"),
        (lambda: envs.step([1, 1]), "lane", "wait"),
        (lambda: envs.step_async([1, 1]), "lane", "begin_step"),
        (lambda: envs.step_wait(), "lane", "wait"),
        (lambda: envs.send([1, 1]), "lane", "begin_rows"),
        (lambda: envs.recv(), "lane", "wait_rows"),
        (lambda: envs.async_reset(), "lane", "begin_reset"),
        (lambda: envs.recv(), "lane", "wait"),
        (lambda: envs.reset(), "lane", "begin_reset"),
        (lambda: envs.call("pid"), "lane", "begin_call"),
        (lambda: envs.call_some([1], "pid"), "lane", "begin_call"),
        (lambda: envs.set_attr("note", 3), "lane", "wait_call"),
        (lambda: envs.render(), "lane", "begin_call"),
    ]
    with contextlib.closing(envhub.make_vec("counter", 2, hub=hub.ipc, lane=lane, render_mode="rgb_array")) as envs:
        others: list[Callable[[], Any]]
        others = [envs.reset, lambda: envs.step([1, 1]), lambda: envs.send([1], [0]), envs.recv, envs.step_wait]
        others += [lambda: envs.call("pid"), envs.render, envs.observe, lambda: envs.set_attr("note", 4), envs.detach]
        others += [envs.async_reset, envs.drop_pending, lambda: envs.has_attr("note"), envs.close]
        envs.reset()
        for call, owner, method in calls:
            parked = Parked(call, getattr(envs._session, owner), method)
            for other in others:
                with pytest.raises(envhub.ConnectionInUse, match="another thread") as caught:
                    other()
                assert isinstance(caught.value, envhub.SessionBusy)
            result = parked.go_on()
            assert not isinstance(result, Exception), (method, result)
        envs.reset()
        assert envs.step([7, 8])[1].tolist() == [7, 8]


def test_env_and_client_are_used_by_one_thread_at_a_time(hub: ServedHub) -> None:
    with contextlib.closing(envhub.make("counter", hub=hub.ipc)) as env, envhub.connect(hub.ipc) as client:
        env.reset()
        parked = Parked(lambda: env.step(7), env._envs._session.lane, "wait")  # type: ignore[attr-defined]
        with pytest.raises(envhub.ConnectionInUse):
            env.step(8)
        assert parked.go_on()[1] == 7
        parked = Parked(client.health, client._connection, "send")
        with pytest.raises(envhub.ConnectionInUse):
            client.stats()
        assert parked.go_on()["status"] == "ok"


@pytest.mark.long
def test_recording_goes_on_after_another_thread_was_refused_to_close_it(tmp_path: Path) -> None:
    envs = envhub.make_vec([lambda: sims.Counter(3)], record=tmp_path / "recorded")
    envs.reset()
    parked = Parked(lambda: envs.step([1]), envs._session.lane, "wait")
    with pytest.raises(envhub.ConnectionInUse):
        envs.close()
    parked.go_on()
    for _ in range(3):
        envs.step([1])
    envs.close()
    assert envs.recorded.episodes == 1


REFUSALS = (AlreadyPendingCallError, NoAsyncCallError, ClosedEnvironmentError, envhub.ConnectionInUse)
CALLS: list[Callable[[envhub.HubVectorEnv, random.Random], Any]] = [
    lambda envs, rng: envs.recv(min_envs=rng.choice([None, 1, 2])),
    lambda envs, rng: envs.send(np.ones(2, int), rng.sample(range(4), 2)),
    lambda envs, _: envs.send(np.ones(4, int)),
    lambda envs, _: envs.step(np.ones(4, int)),
    lambda envs, _: envs.reset(),
    lambda envs, _: envs.step_async(np.ones(4, int)),
    lambda envs, _: envs.step_wait(),
    lambda envs, _: envs.call("pid"),
    lambda envs, _: envs.set_attr("note", 1),
    lambda envs, _: envs.call_some([2], "pid"),
]


class Hammer:
    """Threads that call anything of a vector env at any time, for a while."""

    def __init__(self, envs: envhub.HubVectorEnv, closes: bool = False) -> None:
        """Hammer; if it ``closes``, another thread tries to close it until it has."""
        self.results = self.refusals = 0
        self.unexpected: list[Exception] = []
        self._envs, self._closes, self._begun_s = envs, closes, time.monotonic()
        threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(THREADS)]
        threads += [threading.Thread(target=self._close, daemon=True)] * closes
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
                assert not thread.is_alive(), "it waits for ever"
        finally:
            sys.setswitchinterval(before)
        assert not self.unexpected, self.unexpected

    def _goes_on(self) -> bool:
        """Whether the time is not over yet; it is longer where the machine has stalled in it."""
        passed_s, few = time.monotonic() - self._begun_s, min(self.results, self.refusals) <= ENOUGH
        return passed_s < HAMMERED_S or (few and not self._closes and passed_s < WAIT_S / 2)

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while self._goes_on():
            self._try(lambda: rng.choice(CALLS)(self._envs, rng))

    def _close(self) -> None:
        while not self._envs.closed:
            self._try(self._envs.close)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
            self.results += 1
        except REFUSALS:
            self.refusals += 1
        except Exception as error:
            if "are under way; receive them first" not in str(error):
                self.unexpected.append(error)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*while waiting for a pending call")
def test_threads_that_do_anything_at_any_time_end_with_a_result_or_a_refusal(
    make: Callable[..., envhub.HubVectorEnv],
) -> None:
    envs = make(4)
    try:
        envs.reset()
        hammer = Hammer(envs)
        assert min(hammer.results, hammer.refusals) > ENOUGH
        for pending in (envs.step_wait, envs.recv):
            with contextlib.suppress(NoAsyncCallError):
                pending()
        assert envs.reset()[0][:, 0].tolist() == [0, 0, 0, 0]
        assert envs.step([1, 2, 3, 4])[1].tolist() == [1, 2, 3, 4]
        envs.send([5, 6], [3, 1])
        assert envs.recv()[1].tolist() == [6, 5]
        Hammer(envs, closes=True)
        assert envs.closed
    finally:
        with contextlib.suppress(envhub.ConnectionInUse):  # a thread that waits for ever has it
            envs.close(terminate=True)
