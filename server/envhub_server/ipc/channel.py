"""The control channel between the hub and one worker: framed messages and descriptors over a Unix stream socket.

A frame is its length (uint32, little-endian) and a control message. The hub's end never blocks: bytes that the socket
does not take wait in a buffer until the socket is writable. The worker's end blocks.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import socket
import struct
import termios
from collections import deque
from typing import Sequence

from envhub.transport.descriptors import DESCRIPTORS_MAX, DescriptorReader
from envhub.values import codec
from envhub_server.ipc import control

MESSAGE_BYTES_MAX = 1 << 30
WORKER_MESSAGE_BYTES_MAX = 1 << 26  # of a worker's message, unless its hub is private
WORKER_LIMITS = codec.HeaderLimits(codec.BYTES_MAX, 1 << 14)  # likewise; an item takes the hub some microseconds
READ_BYTES = 1 << 18  # at a time, of a message that is known to be so long, ...
FEW_BYTES = 1 << 12  # ... else so few, because many small messages would take the reader's time
MOVED_UP_TO = 1024  # the lowest number for a descriptor that env code must not close by accident, ...
MOVED_UP_MAX = 64  # ... or this far below the process's limit of descriptors, if that is lower

FORKED_STATUS = 1  # exit status of a forked process that executes code of the worker that it was forked from

_LENGTH = struct.Struct("<I")
_INT = struct.Struct("i")


def moved_up(descriptor: int) -> int:
    """A high number for this descriptor, close-on-exec; env code that closes all usual descriptors leaves it open."""
    # Env code calls ``os.closerange(3, 101)``, or up to 256 or 1024, before it executes another program.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(3, min(MOVED_UP_TO, limit - MOVED_UP_MAX)))
    os.close(descriptor)
    return moved


class ChannelClosed(Exception):
    """The other end has closed, or this end is no open socket."""


class Channel:
    """One end of the channel."""

    def __init__(self, connection: socket.socket, descriptors_max: int = DESCRIPTORS_MAX) -> None:
        self.sent_bytes_max = self.received_bytes_max = MESSAGE_BYTES_MAX  # of one message
        self.received_bytes = 0  # how many have been received
        self.received_limits = codec.KNOWN  # of the items of one message
        self._pid = os.getpid()
        self._socket = connection
        self._reader = DescriptorReader(connection, descriptors_max)
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()

    def renew(self, connection: socket.socket) -> Channel:
        """Be a channel over this connection, in a copy of the process that had made this one."""
        self.close()
        self._pid, self._socket = os.getpid(), connection
        self._reader = DescriptorReader(connection, DESCRIPTORS_MAX)
        self._incoming.clear()
        self._outgoing.clear()
        return self

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def backlogged(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        # A process that was forked from the one that made the channel ends here. C code may fork without the
        # interpreter's knowledge, so this is checked at every message.
        if os.getpid() != self._pid:
            os._exit(FORKED_STATUS)
        pieces = control.pack(message)
        length = sum(map(len, pieces))
        if length > self.sent_bytes_max:
            text = f"an info, a result of a call or another message ({type(message).__name__}) of {length} bytes"
            raise ValueError(f"{text}; a worker's has at most {self.sent_bytes_max}")
        if descriptors:
            # They travel with the frame's first bytes, which MUST leave in this call, with none waiting before them.
            if self._outgoing:
                raise RuntimeError("descriptors cannot overtake a message that still waits to be sent")
            rights = array.array("i", descriptors).tobytes()
            try:
                self._socket.sendmsg([_LENGTH.pack(length)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except OSError as error:
                raise ChannelClosed(str(error)) from error
        else:
            pieces[0] = _LENGTH.pack(length) + pieces[0]
        self._outgoing.extend(map(memoryview, pieces))
        self.flush()

    def flush(self) -> None:
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing[0])
            except BlockingIOError:
                return
            except OSError as error:
                self._outgoing.clear()  # the hub may send more before it learns that the worker has ended
                raise ChannelClosed(str(error)) from error
            piece = self._outgoing.popleft()
            if sent < len(piece):
                self._outgoing.appendleft(piece[sent:])

    def receive(self) -> list[object] | None:
        """The messages that are complete after one read; None if a non-blocking socket has no data."""
        missing = 0  # of the message that has begun
        if len(self._incoming) >= _LENGTH.size:
            missing = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0] - len(self._incoming)
        try:
            chunk = self._reader.read(min(max(missing, FEW_BYTES), READ_BYTES))
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not chunk:
            raise ChannelClosed("end of file")
        self.received_bytes += len(chunk)
        self._incoming += chunk
        messages: list[object] = []
        start = 0
        while len(self._incoming) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            end = start + _LENGTH.size + length
            if length > self.received_bytes_max:
                raise codec.DecodeError(f"a message of {length} bytes, of at most {self.received_bytes_max}")
            if end > len(self._incoming):
                break
            with memoryview(self._incoming) as incoming:
                messages.append(control.unpack(incoming[start + _LENGTH.size : end], self.received_limits))
            start = end
        del self._incoming[:start]
        return messages

    def arrived_bytes(self) -> int:
        waiting = fcntl.ioctl(self._socket, termios.FIONREAD, bytes(_INT.size))
        return self.received_bytes + int(_INT.unpack(waiting)[0])

    def take_descriptors(self, count: int) -> list[int]:
        taken = self._reader.take(count)
        if len(taken) != count:
            raise ChannelClosed(f"{count} descriptors expected, {len(taken)} came")
        return list(map(moved_up, taken))

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        self._reader.close()
