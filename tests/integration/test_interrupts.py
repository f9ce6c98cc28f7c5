"""Ctrl-C leaves a session that goes on; ``chaos/test_repeated_waits.py`` has it at every line of every wait."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import sims
import zmq
from chaos.chaos_proxy import proxy
from chaos.interrupts import Interrupt, Places
from envhub_client.connection.connection import Connection, connect
from envhub_client.connection.local_sockets import OwnHub
from envhub_client.connection.zeromq_transport import ZeroMqTransport
from hubs import ServedHub, interrupted_after, signalled_in_a_wait, stopped, wait_until, worker_processes

import envhub
from envhub.errors import LocalProtocolError
from envhub.protocol.messages import Close, Make, Op
from envhub.vector_errors import NothingPending

PYZMQ = (f"{Path(zmq.__file__).parent}{os.sep}",)


@pytest.mark.parametrize("lasts_s", [0.0, 0.3])
def test_vector_env_that_a_signal_handler_closes_in_a_wait_says_so(lasts_s: float) -> None:
    envs = envhub.make_vec([Slow] * 2, num_workers=1, lane="wire")
    envs.reset()

    def close(*_: object) -> None:
        envs.close(terminate=True)
        time.sleep(lasts_s)

    before = signal.signal(signal.SIGALRM, close)
    try:
        envs.step_async(np.full(2, 8))
        with pytest.raises(LocalProtocolError), signalled_in_a_wait(signal.SIGALRM):
            envs.step_wait()
    finally:
        signal.signal(signal.SIGALRM, before)


class Slow(sims.Counter):
    """Takes very long for action 8."""

    def act(self, action: int) -> None:
        if action == 8:
            time.sleep(60.0)


def test_request_after_one_that_was_given_up_waits_for_its_end() -> None:
    with closing(envhub.make_vec([sims.Naughty], lane="wire")) as envs:
        envs.reset()
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt), interrupted_after(0.02):
                envs.set_attr("nap", 0.3)
            assert envs.step([7])[1].tolist() == [7]


@contextmanager
def interrupted_by(error: type[BaseException]) -> Iterator[None]:
    """Raise this in the main thread while it waits in the block."""

    def interrupt(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(error), signalled_in_a_wait(signal.SIGALRM):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


class Alarm(Exception):
    """What a signal handler of a program raises."""


COMBINED: dict[str, Callable[[Any], Any]] = {
    "step": lambda envs: envs.step(np.full(2, 5)),
    "reset": lambda envs: envs.reset(),
    "call": lambda envs: envs.call("pid"),
}


@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_interrupted_call_leaves_nothing_to_wait_for(lane: str, name: str) -> None:
    with closing(envhub.make_vec([sims.Counter] * 2, num_workers=1, lane=lane)) as envs:
        envs.reset()
        pids = envs.call("pid")
        for follow in (envs.reset, lambda: envs.step(np.full(2, 7))):
            with stopped(*pids), interrupted_by(KeyboardInterrupt):
                COMBINED[name](envs)
            with pytest.raises(NothingPending):
                envs.step_wait()
            found = follow()
            assert len(found) == 2 or found[1].tolist() == [7, 7]
        before = envs.reset()[0][:, 0]
        assert (envs.step(np.full(2, 3))[0][:, 0] == before + 1).all()


def test_single_env_goes_on_after_an_interrupt() -> None:
    with closing(envhub.make(sims.Counter)) as env:
        env.reset()
        workers = [process.pid for process in worker_processes(os.getpid())]
        for work in (lambda: env.step(5), env.reset, env.render):
            with stopped(*workers), interrupted_by(KeyboardInterrupt):
                work()
            assert env.reset()[0][0] == 0
            assert env.step(7)[1] == 7


@pytest.mark.long
@pytest.mark.parametrize("lane", ["auto", "wire"])
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.chaos)])
def test_step_after_a_reset_that_was_interrupted_is_never_overtaken_by_it(
    hub: ServedHub, lane: str, stride: int
) -> None:
    """The hub is stopped, so that it reads the RESET only after the client has gone on."""
    count = 0
    with (
        closing(envhub.make_vec("counter", 2, hub=hub.ipc, num_workers=2, lane=lane)) as envs,
        closing(envhub.connect(hub.ipc)) as client,
    ):
        observer = client.attach(envs.token, observe=True)
        for count in range(1, 1000):
            envs.reset()
            envs.step([3, 3])
            interrupt = Interrupt(count * stride)
            resume = threading.Timer(0.01, hub.process.send_signal, [signal.SIGCONT])
            with stopped(hub.process.pid):
                interrupt.during(envs.reset_async)
                resume.start()
                try:
                    envs.step_async([5, 5])
                except envhub.SessionBusy:  # the interrupt came when all was done
                    envs.reset_wait()
                    envs.step_async([5, 5])
            resume.join()
            if not interrupt.raised:
                break
            client.health()  # is answered after all that the hub had to read
            for _ in range(5):
                observer.observe()
            observations, rewards, *_ = envs.step_wait()
            assert rewards.tolist() == [5, 5] and observations[:, 0].tolist() in ([1, 1], [2, 2]), count
        observer.close()
        envs.step_wait()
    assert count * stride > 50


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what is dropped says that it was open
@pytest.mark.parametrize("is_own", [pytest.param(False, marks=pytest.mark.chaos), True])
def test_interrupt_anywhere_in_connecting_leaves_no_descriptor(hub: ServedHub, is_own: bool) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    places = Places()
    path = hub.ipc.removeprefix("ipc://")
    own = OwnHub(os.pidfd_open(hub.process.pid), os.open(path, os.O_PATH), os.open(f"{path}.side", os.O_PATH))
    known = own if is_own else None
    places.during(lambda: Connection(ZeroMqTransport(hub.ipc, known)).await_hub()).close()
    gc.collect()
    before = descriptors()
    for place in places.found:
        interrupt = Interrupt(1, place)
        connection = interrupt.during(lambda: Connection(ZeroMqTransport(hub.ipc, known)).await_hub())
        if connection is not None:
            connection.close()
        del connection
        if descriptors() > before:  # a collection takes a second in a process that has run many tests
            gc.collect()
        assert wait_until(lambda: descriptors() <= before), place
    for descriptor in own:
        os.close(descriptor)


class PlacesOfPyzmq(Places):
    """Counts the places in pyzmq's Python code."""

    folders = PYZMQ


class InterruptInPyzmq(Interrupt):
    """Raises ``KeyboardInterrupt`` at such a place."""

    folders = PYZMQ


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a destructor
def test_interrupt_while_pyzmq_opens_a_socket_ends_the_connecting(hub: ServedHub) -> None:
    """The interrupt's traceback holds the socket, which the connection closes all the same."""
    places, raised, held = PlacesOfPyzmq(), 0, []

    def connecting() -> Connection:
        try:
            return connect(hub.ipc)
        except KeyboardInterrupt as error:
            held.append(error)
            raise

    places.during(lambda: connect(hub.ipc)).close()
    before = len(os.listdir("/proc/self/fd"))
    opening = [(place, n) for place, n in places.found.items() if place.function in ("__init__", "socket")]
    for place, times in opening:
        for time_passed in range(1, times + 1):
            interrupt = InterruptInPyzmq(time_passed, place)
            connection = interrupt.during(connecting)
            if connection is not None:
                connection.close()
            raised += interrupt.raised
    assert raised > 10 and len(held) > 10
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_interrupt_anywhere_in_hearing_of_a_cut_leaves_the_next_one_to_be_heard(hub: ServedHub) -> None:
    places, raised = Places(), 0
    with (
        proxy(hub.tcp) as wire,
        closing(envhub.make_vec("counter", 2, hub=wire.address)) as envs,
        closing(envhub.connect(hub.ipc)) as client,
    ):
        connection = envs._session.connection

        def check() -> None:
            for _ in range(30):  # it is connected again by then
                connection.check()
                time.sleep(0.005)

        def leased() -> bool:
            return any(session["leased"] for session in client.sessions())

        def heard() -> bool:
            wire.cut()
            places.during(check)
            return {"disconnected", "connected"} <= {place.function for place in places.found}

        assert wait_until(heard)  # and not the thread that keeps the connection alive
        for place in [place for place in places.found if place.function == "_on_monitor"]:
            interrupt = Interrupt(1, place)
            wire.cut()
            interrupt.during(check)
            raised += interrupt.raised
            wire.hold()
            wire.cut()
            assert wait_until(leased)
            wire.hold(False)
            assert wait_until(lambda: connection.check() or not leased()), place  # it says that it is back
    assert raised > 5


def test_make_that_its_own_close_overtakes_makes_nothing(hub: ServedHub) -> None:
    """The CLOSE goes by another connection than the MAKE that was given up, as after an interrupt in its sending."""
    token = os.urandom(16)
    with closing(connect(hub.tcp, token)) as late, closing(connect(hub.tcp, token)) as early:
        early.give_up()
        early.send(Op.CLOSE, Close(terminate=True))
        assert early.wait(20).message.code == "session_lost"
        with pytest.raises(envhub.SessionLost):
            late.ask(Op.MAKE, Make(1, "counter"))
    with envhub.connect(hub.tcp) as client:
        assert token.hex()[:8] not in {session["session"] for session in client.sessions()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, Alarm])
def test_interrupted_close_can_be_repeated(error: type[BaseException]) -> None:
    envs = envhub.make_vec([sims.SlowClose] * 2, num_workers=1)
    envs.reset()
    pids = set(envs.call("pid"))
    with interrupted_by(error):
        envs.close()
    envs.close()
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_close_that_was_interrupted_when_its_sockets_were_closed_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    envhub.make_vec("CartPole-v1", 2).close()  # starts the private hub
    before = len(os.listdir("/proc/self/fd"))
    envs = envhub.make_vec("CartPole-v1", 2)
    envs.reset()

    def destroy(self: zmq.Context[Any], linger: int | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(zmq.Context, "destroy", destroy)
        envs.close()
    with pytest.raises(envhub.SessionClosed):
        envs.call("render")
    envs.close()
    assert envs.closed and wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
