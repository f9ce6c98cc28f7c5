"""The thread that looks after connections lives as long as there are any."""

from __future__ import annotations

import gc
import math
import signal
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
from envhub_client.connection import connection
from envhub_client.connection.connection import Connection, ConnectionLock, KeepAlive
from envhub_client.session.pending import InUse

from envhub.protocol.prelude import NO_SESSION, RECONNECT_S

DEADLINE_S = 10.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after connections more often than is needed."""
    monkeypatch.setattr(connection, "CHECK_S", 0.02)


class Counted:
    """Counts how often it was kept."""

    def __init__(self) -> None:
        self.times = 0
        self.kept = threading.Event()

    def keep_alive(self) -> None:
        self.times += 1
        self.kept.set()


def test_what_is_added_is_kept_until_it_is_dropped() -> None:
    keep_alive, first, second = KeepAlive(), Counted(), Counted()
    keep_alive.add(first)
    assert first.kept.wait(DEADLINE_S)
    keep_alive.add(second)
    keep_alive.drop(first)
    seen = first.times
    assert second.kept.wait(DEADLINE_S)
    second.kept.clear()
    assert second.kept.wait(DEADLINE_S) and first.times <= seen + 1  # it may have been at it
    keep_alive.stop()


def test_thread_ends_with_the_last_thing_to_keep_and_begins_again() -> None:
    keep_alive, kept = KeepAlive(), Counted()
    for _ in range(2):
        kept.kept.clear()
        keep_alive.add(kept)
        thread = keep_alive._thread
        assert thread is not None and kept.kept.wait(DEADLINE_S)
        keep_alive.drop(kept)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_nothing_is_kept_alive() -> None:
    keep_alive, kept = KeepAlive(), Counted()
    keep_alive.add(kept)
    thread = keep_alive._thread
    del kept
    gc.collect()
    assert thread is not None
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_what_is_dropped_while_the_thread_looks_ends_it_not() -> None:
    # As the garbage collector does, which runs in whatever that thread is doing.
    keep_alive, kept, dropped = KeepAlive(), Counted(), [Counted() for _ in range(4)]
    left = [*dropped]

    def drop_one(frame: Any, event: str, argument: object) -> Any:
        if "weakref" in frame.f_code.co_filename and frame.f_code.co_name in ("__iter__", "valuerefs") and left:
            keep_alive.drop(left.pop())
        return drop_one

    before = threading.gettrace()
    threading.settrace(drop_one)
    try:
        for each in [*dropped, kept]:
            keep_alive.add(each)
    finally:
        threading.settrace(before)  # type: ignore[arg-type]
    assert kept.kept.wait(DEADLINE_S)
    thread = keep_alive._thread
    assert thread is not None and thread.is_alive() and len(left) < len(dropped)
    keep_alive.stop()


def test_stopped_keep_alive_starts_no_thread() -> None:
    keep_alive = KeepAlive()
    keep_alive.stop()
    keep_alive.add(Counted())
    assert keep_alive._thread is None


def test_interrupt_before_the_thread_starts_leaves_the_next_one_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    keep_alive, first, second = KeepAlive(), Counted(), Counted()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        keep_alive.add(first)
    keep_alive.add(second)
    assert first.kept.wait(DEADLINE_S) and second.kept.wait(DEADLINE_S)
    keep_alive.stop()


def test_end_of_a_program_whose_thread_never_started_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_alive = KeepAlive()
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    keep_alive.add(Counted())
    keep_alive.stop()


def test_connection_that_was_just_looked_at_is_left_to_who_waits_for_its_descriptors() -> None:
    transport = Mock(address="tcp://hub:1", crosses_network=True, closed=False, received_ns=0)
    transport.receive.return_value = None
    kept = Connection(transport, NO_SESSION, DEADLINE_S, RECONNECT_S)
    for looked_s, takes_in in ((math.inf, False), (-math.inf, True)):
        kept.protocol.looked_s = looked_s
        kept.keep_alive()
        assert transport.receive.called == takes_in
    kept.close()


@pytest.mark.parametrize("lock", [ConnectionLock("tcp://hub:1"), InUse()], ids=["connection", "session"])
def test_interrupts_leave_no_lock_taken(lock: Any) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        if armed:
            armed.clear()
            raise Interrupted

    armed: list[bool] = []
    interrupts, until_s = 0, time.monotonic() + 20
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        while interrupts < 1000 and time.monotonic() < until_s:
            try:
                armed[:] = [True]
                for _ in range(1000):
                    with lock:
                        pass
                armed.clear()
            except Interrupted:
                interrupts += 1
            assert not lock._is_owned()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts == 1000
