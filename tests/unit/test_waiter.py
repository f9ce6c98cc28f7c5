"""Waiting for descriptors on every system."""

from __future__ import annotations

import select
import socket
import time

import pytest
from envhub_client.connection.zeromq_transport import READABLE, TURN_S, PollWaiter, SelectWaiter, Waiter, new_waiter


def waiters() -> list[Waiter]:
    return [new_waiter(), PollWaiter(), SelectWaiter()]


def test_linux_waits_by_epoll() -> None:
    assert isinstance(new_waiter(), select.epoll)


@pytest.mark.parametrize("waiter", waiters(), ids=["epoll", "poll", "select"])
def test_waiter_returns_what_is_readable_until_it_is_closed(waiter: Waiter) -> None:
    ours, theirs = socket.socketpair()
    other, silent = socket.socketpair()
    with ours, theirs, other, silent:
        for end in (ours, other):
            waiter.register(end.fileno(), READABLE)
        assert list(waiter.poll(0)) == []
        theirs.send(b"x")
        assert list(waiter.poll(10)) == [(ours.fileno(), READABLE)]
        waiter.close()
        waiter.close()
        with pytest.raises(ValueError):
            waiter.poll(0)


def test_select_waits_in_turns_in_which_an_interrupt_is_handled() -> None:
    waiter = SelectWaiter()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        waiter.register(ours.fileno(), READABLE)
        begun_s = time.monotonic()
        assert list(waiter.poll(60)) == []
        assert TURN_S / 2 < time.monotonic() - begun_s < 30
