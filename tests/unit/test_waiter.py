"""Waiting for descriptors on every system, and rings, which hold up nobody."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from envhub_client.connection.zeromq_transport import READABLE, SELECT_S, SelectorWaiter, new_waiter
from envhub_server.loop import Ringer


@pytest.mark.parametrize("new", [new_waiter, SelectorWaiter], ids=["epoll", "selectors"])
def test_waiter_returns_what_is_readable_until_it_is_closed(new: Callable[[], Any]) -> None:
    waiter = new()
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


def test_selectors_wait_in_turns_in_which_an_interrupt_is_handled() -> None:
    waiter = SelectorWaiter()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        waiter.register(ours.fileno(), READABLE)
        begun_s = time.monotonic()
        assert list(waiter.poll(60)) == []
        assert SELECT_S / 2 < time.monotonic() - begun_s < 30


FULL = (2**64 - 2).to_bytes(8, "little")
DEADLINE_S = 10.0


def test_ring_of_a_full_bell_waits_for_its_holder_alone() -> None:
    bell, other = os.eventfd(0, 0), os.eventfd(0, 0)
    os.write(bell, FULL)
    ringer = Ringer()
    ringer.ring(bell)
    ringer.ring(bell)
    Ringer().ring(other)
    assert select.select([other], [], [], DEADLINE_S)[0] and os.read(other, 8)
    assert os.read(bell, 8)
    assert select.select([bell], [], [], DEADLINE_S)[0] and os.read(bell, 8)
    os.close(bell)
    os.close(other)


def test_every_ring_is_heard() -> None:
    bell, ringer = os.eventfd(0, os.EFD_NONBLOCK), Ringer()
    for _ in range(100):
        ringer.ring(bell)
        assert select.select([bell], [], [], DEADLINE_S)[0] and os.read(bell, 8)
    os.close(bell)
