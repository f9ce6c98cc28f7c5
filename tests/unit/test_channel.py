"""The control channel between the hub and a worker."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from envhub_server.ipc import channel, control
from envhub_server.ipc.channel import Channel, ChannelClosed

from envhub.values import codec

Ends = tuple[Channel, socket.socket]
SMALL = control.RowInfo(0, b"", 1)


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The hub's end, and the socket that a worker may write to."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield Channel(ours, descriptors_max=0), theirs


def framed(message: object) -> bytes:
    packed = b"".join(control.pack(message))
    return len(packed).to_bytes(4, "little") + packed


def test_many_small_messages_are_received_a_few_at_a_time(ends: Ends) -> None:
    ours, theirs = ends
    one, count = framed(SMALL), 2000
    theirs.sendall(one * count)
    received = 0
    while found := ours.receive():
        assert len(found) <= channel.FEW_BYTES / len(one) + 1
        received += len(found)
    assert received == count


def test_large_message_is_received_by_large_reads(ends: Ends) -> None:
    ours, theirs = ends
    message = control.CallResults([bytes(100_000)], 1)
    theirs.sendall(framed(message))
    assert ours.receive() == [] and ours.receive() == [message]


def test_what_has_arrived_is_known_without_receiving_it(ends: Ends) -> None:
    ours, theirs = ends
    theirs.sendall(framed(SMALL))
    arrived = ours.arrived_bytes()
    theirs.sendall(framed(SMALL))
    ours.receive()
    assert arrived == len(framed(SMALL)) and ours.received_bytes == ours.arrived_bytes() == 2 * arrived


@pytest.mark.parametrize(
    ("read_bytes", "before_it_is_asked"), [(0, False), (0, True), (3, False), (3, True), (len(framed(SMALL)), True)]
)
def test_what_a_closed_end_left_unread_is_known(ends: Ends, read_bytes: int, before_it_is_asked: bool) -> None:
    ours, theirs = ends
    theirs.sendall(framed(SMALL))
    ours.send(SMALL)
    assert not ours.left_unread()
    theirs.recv(read_bytes)
    theirs.close()
    if before_it_is_asked:
        assert ours.receive() == [SMALL]
        with pytest.raises(channel.ChannelClosed):
            ours.receive()
    assert ours.left_unread() == (read_bytes < len(framed(SMALL)))


def test_what_was_not_taken_is_unread(ends: Ends) -> None:
    ours, theirs = ends
    ours.send(control.CallResults([bytes(1 << 24)], 1))
    with contextlib.suppress(BlockingIOError):
        while theirs.recv(1 << 20, socket.MSG_DONTWAIT):
            pass
    theirs.close()
    assert ours.left_unread()


def test_message_of_more_items_than_a_worker_may_send_is_refused(ends: Ends) -> None:
    ours, theirs = ends
    ours.received_limits = channel.WORKER_LIMITS
    theirs.sendall(framed(control.CallResults([b""] * 20_000, 1)))
    with pytest.raises(codec.DecodeError, match="more than 16384 items"):
        while ours.receive() is not None:
            pass


def test_each_message_to_an_end_that_is_closed_says_so(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()
    for descriptors in ((), (0,)):
        with pytest.raises(ChannelClosed):
            ours.send(SMALL, descriptors)
    assert not ours.backlogged
