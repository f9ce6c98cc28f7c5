from __future__ import annotations

import array
import fcntl
import os
import socket
from collections.abc import Iterator

import pytest

from envhub.transport.descriptors import DescriptorReader, above_stdio


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
