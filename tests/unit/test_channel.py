"""The control channel between the hub and a worker."""

from __future__ import annotations

import array
import fcntl
import os
import socket
from collections.abc import Iterator

import pytest
from envhub_server.ipc import channel, control
from envhub_server.ipc.channel import Channel, ChannelClosed

from envhub.transport.descriptors import DescriptorReader, above_stdio
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
    message = control.RowInfo(0, bytes(100_000))
    theirs.sendall(framed(message))
    assert ours.receive() == [] and ours.receive() == [message]


def test_what_has_arrived_is_known_without_receiving_it(ends: Ends) -> None:
    ours, theirs = ends
    theirs.sendall(framed(SMALL))
    arrived = ours.arrived_bytes()
    theirs.sendall(framed(SMALL))
    ours.receive()
    assert arrived == len(framed(SMALL)) and ours.received_bytes == ours.arrived_bytes() == 2 * arrived


def test_message_of_more_items_than_a_worker_may_send_is_refused(ends: Ends) -> None:
    ours, theirs = ends
    ours.received_limits = channel.WORKER_LIMITS
    theirs.sendall(framed(control.SetAttrRows([0], "x", [b""] * 20_000)))
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


# --- descriptors ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, DescriptorReader]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = DescriptorReader(ours)
        yield theirs, reader
        reader.close()


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def send(end: socket.socket, data: bytes, *descriptors: int) -> None:
    rights = array.array("i", descriptors).tobytes()
    end.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else [])


def test_descriptors_come_with_bytes_and_are_close_on_exec(pair: tuple[socket.socket, DescriptorReader]) -> None:
    end, reader = pair
    ours, theirs = os.pipe()
    send(end, b"two", ours, theirs)
    assert reader.read(100) == b"two" and len(reader.descriptors) == 2
    first, second = reader.take(1)[0], reader.take(9)[0]
    assert reader.descriptors == [] and not reader.truncated
    os.write(second, b"x")
    assert os.read(first, 9) == b"x"
    assert all(fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for descriptor in (first, second))
    for descriptor in (ours, theirs, first, second):
        os.close(descriptor)


def test_descriptors_that_were_not_taken_are_closed(pair: tuple[socket.socket, DescriptorReader]) -> None:
    end, reader = pair
    for number in range(2):
        send(end, bytes([number]), 0)
        reader.read(100)
    found = list(reader.descriptors)
    assert len(found) == 2 and all(map(is_open, found))
    reader.close()
    reader.close()
    assert not any(map(is_open, found))


def test_interrupt_right_after_they_came_leaves_no_unknown_descriptors(
    pair: tuple[socket.socket, DescriptorReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, reader = pair
    send(end, b"x", 0)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reader, "_unpack", interrupted)
        reader.read(100)
    before = len(os.listdir("/proc/self/fd"))
    reader.close()
    assert len(os.listdir("/proc/self/fd")) <= before - 1


def test_end_of_the_stream_is_no_bytes_and_an_error_is_the_sockets(
    pair: tuple[socket.socket, DescriptorReader],
) -> None:
    end, reader = pair
    reader._socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        reader.read(1)
    end.close()
    assert reader.read(1) == b""


def test_reader_of_no_descriptors_accepts_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = DescriptorReader(ours, descriptors_max=0)
        send(theirs, b"x", 0)
        assert reader.read(1) == b"x" and reader.descriptors == [] and reader.truncated


def test_descriptor_of_a_usual_number_is_left_alone() -> None:
    ours, theirs = os.pipe()
    assert above_stdio(ours) == ours and is_open(ours)
    os.close(ours)
    os.close(theirs)
