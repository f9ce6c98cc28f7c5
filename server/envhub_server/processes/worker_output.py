"""What workers print: read from their pipes little by little, passed on to the hub's own streams, the last of it kept.

Whatever a worker prints, a turn of the hub's loop reads a bounded amount of it. A reader of the hub's stream that has
fallen behind holds the workers up, as it would any program that prints, but none for longer than it takes to see that
nobody reads: from then on their output is dropped and counted, until somebody does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time

import structlog

from envhub_server.loop.poller import Poller
from envhub_server.processes.nonblocking_writer import NonblockingWriter

TAIL_BYTES = 16384
READ_BYTES = 16384
PIPES_PER_TURN = 8
DRAIN_BYTES_MAX = 1 << 17  # of a worker that has ended; what it started may go on printing, and a pipe holds 64 KiB
HELD_BYTES_MAX = 1 << 18
PATIENCE_S = 1  # with a reader that reads nothing
LAST_S = 0.5  # for a slow reader to take the last of it when the hub ends

_NAMES = {1: "stdout", 2: "stderr"}

log = structlog.get_logger("envhub.output")


class Tail:
    """The last of what came by one pipe."""

    def __init__(self) -> None:
        self.kept = b""

    def add(self, chunk: bytes) -> None:
        """Keep ``chunk``, and of what came before it as much as there is room for."""
        self.kept = (self.kept + chunk)[-TAIL_BYTES:]


class Timer:
    """A descriptor that is readable once the time is over, which the hub's loop watches like any other."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        clock_monotonic = 1
        self._descriptor = self._libc.timerfd_create(clock_monotonic, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"a timer cannot be made: {os.strerror(error)}")

    def fileno(self) -> int:
        """The descriptor."""
        return int(self._descriptor)

    def start(self, seconds: int) -> None:
        """Have it over in so many seconds from now; 0 stops it."""
        no_interval_then_once = (ctypes.c_long * 4)(0, 0, seconds, 0)
        self._libc.timerfd_settime(self._descriptor, 0, no_interval_then_once, None)

    def is_over(self) -> bool:
        """Whether it is over; asked once."""
        try:
            return bool(os.read(self._descriptor, 8))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self._descriptor)


class Stream:
    """One standard stream of the hub, and the pipes of all workers that go there.

    Attributes:
        dropped: bytes that nobody took, since there was no reader, or one that did not read.
    """

    def __init__(self, poller: Poller, descriptor: int) -> None:
        self.dropped = 0
        self._name = _NAMES[descriptor]
        self._poller = poller
        self._sink = NonblockingWriter(descriptor)
        self._tails: dict[int, Tail] = {}
        self._held = b""  # what was read, and waits for the sink
        self._given_up = False
        self._told = 0
        self._pipes, self._room = select.epoll(), select.epoll()
        self._timer = Timer()
        self._room.register(self._timer.fileno(), select.EPOLLIN)
        poller.register(self._pipes.fileno(), self)
        poller.register(self._room.fileno(), self)

    def add(self, pipe: int, tail: Tail) -> None:
        """Read from this pipe from now on; it must not block."""
        self._pipes.register(pipe, select.EPOLLIN)
        self._tails[pipe] = tail

    def remove(self, pipe: int) -> None:
        """Read what is left in it, and then no more."""
        self.drain(pipe)
        self._forget(pipe)

    def drain(self, pipe: int) -> None:
        """Read what is in the pipe now."""
        left = DRAIN_BYTES_MAX
        while pipe in self._tails and left > 0 and (read := self._read(pipe)):
            left -= read

    def _forget(self, pipe: int) -> None:
        if self._tails.pop(pipe, None) is not None:
            self._pipes.unregister(pipe)

    def on_ready(self, descriptor: int) -> None:
        """Read what workers have written, or write what waits for room."""
        if descriptor == self._room.fileno():
            self._on_room()
            return
        for pipe, _ in self._pipes.poll(0, PIPES_PER_TURN):
            self._read(pipe)
            if self._held:
                return

    def _read(self, pipe: int) -> int:
        try:
            chunk = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return 0
        if not chunk:
            self._forget(pipe)  # the env closed its end, and so did all that it started
            return 0
        self._tails[pipe].add(chunk)
        self._pass_on(chunk)
        return len(chunk)

    def _pass_on(self, chunk: bytes) -> None:
        taken = 0 if self._held else self._sink.write(chunk)
        rest = chunk[taken:]
        if not rest:
            self._tell_dropped()
        elif self._given_up or self._sink.gone or len(self._held) + len(rest) > HELD_BYTES_MAX:
            self.dropped += len(rest)
        elif self._held:
            self._held += rest
        else:
            self._held = rest
            self._pause()

    def _pause(self) -> None:
        """Read no more until there is room for what was read."""
        self._poller.unregister(self._pipes.fileno())
        with contextlib.suppress(OSError):  # a file on a full disk cannot be waited for; the timer ends the pause
            self._room.register(self._sink.descriptor, select.EPOLLOUT)
        self._timer.start(PATIENCE_S)

    def _on_room(self) -> None:
        over = self._timer.is_over()
        taken = self._sink.write(self._held)
        self._held = self._held[taken:]
        if self._held and (self._sink.gone or (over and not taken)):
            self._given_up = True
            self.dropped += len(self._held)
            self._held = b""
        if self._held:
            if taken:
                self._timer.start(PATIENCE_S)
            return
        with contextlib.suppress(OSError):
            self._room.unregister(self._sink.descriptor)
        self._timer.start(0)
        self._poller.register(self._pipes.fileno(), self)

    def _tell_dropped(self) -> None:
        self._given_up = False
        if self.dropped > self._told:
            log.warning("output_dropped", stream=self._name, bytes=self.dropped - self._told)
            self._told = self.dropped

    def close(self) -> None:
        """Pass on what was read, as far as somebody takes it in time, and stop."""
        self._timer.start(0)
        deadline_s = time.monotonic() + LAST_S
        while self._held and not self._sink.gone and (left_s := deadline_s - time.monotonic()) > 0:
            self._room.poll(left_s)
            self._held = self._held[self._sink.write(self._held) :]
        for waited in (self._pipes, self._room):
            self._poller.unregister(waited.fileno())
            waited.close()
        self._timer.close()


class Streams:
    """The hub's standard output and error, as its workers share them."""

    def __init__(self, poller: Poller) -> None:
        self.output, self.error = Stream(poller, 1), Stream(poller, 2)

    def close(self) -> None:
        """Stop reading."""
        self.output.close()
        self.error.close()


class Output:
    """The output of one worker.

    Attributes:
        far_ends: what the worker writes to in place of its standard output and error; closed by ``close_far_ends``.
    """

    def __init__(self, streams: Streams) -> None:
        """Make two pipes.

        Raises:
            OSError: no descriptors are to be had; nothing is left behind.
        """
        self._tails = Tail(), Tail()
        self._readers: list[tuple[Stream, int]] = []
        self.far_ends: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for stream, tail in zip((streams.output, streams.error), self._tails, strict=True):
                ours, theirs = os.pipe()
                self.far_ends.append(theirs)
                self._readers.append((stream, ours))
                os.set_blocking(ours, False)
                stream.add(ours, tail)
            undo.pop_all()

    @property
    def tail(self) -> str:
        """The last of what it printed until now, to its standard output and then to its standard error.

        Nobody knows what of the two came first, and a stack that was asked for is to stand at the end.
        """
        for stream, pipe in self._readers:
            stream.drain(pipe)
        kept = b"".join(tail.kept for tail in self._tails)[-TAIL_BYTES:]
        return kept.decode("utf-8", "backslashreplace")

    def close_far_ends(self) -> None:
        """Leave them to the worker."""
        for descriptor in self.far_ends:
            os.close(descriptor)
        self.far_ends.clear()

    def close(self) -> None:
        """Read what is left, and free the pipes."""
        self.close_far_ends()
        for stream, pipe in self._readers:
            stream.remove(pipe)
            os.close(pipe)
        self._readers.clear()
