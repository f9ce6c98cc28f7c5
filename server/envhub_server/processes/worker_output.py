"""The output of workers: read from their pipes, written to the hub's own streams, and the last of it kept.

The hub's loop reads a bounded amount each time. If the reader of the hub's stream is slow, workers that print wait for
it, as any program does. If the reader reads nothing for ``PATIENCE_S``, the output of workers is dropped and counted
until it reads again.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from envhub_server.log import Logger, copied, json_line, writer_to
from envhub_server.loop import Loop

TAIL_BYTES = 16384
READ_BYTES = 16384
PIPES_PER_TURN = 8
DRAIN_BYTES_MAX = 1 << 17  # of a worker that has ended; its children may go on printing, and a pipe holds 64 KiB
HELD_BYTES_MAX = 1 << 18
PATIENCE_S = 1  # for a reader that reads nothing
LAST_S = 0.5  # for a slow reader when the hub ends
TEXT_CHARS_MAX = 3000  # of an event; what is printed without an end of a line is held back until then

log = Logger("envhub.output")


class OutputEvents:
    """Output of one process to a stream, as lines of JSON; each has the process's ``label``."""

    def __init__(self, stream: str, label: Mapping[str, Any]) -> None:
        self._stream, self._label = stream, label
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._begun = ""  # a line without its end yet

    def lines(self, printed: bytes) -> bytes:
        """The events of what was printed since the last time, in which a line that has not ended yet is not."""
        text = self._begun + self._decoder.decode(printed)
        end = text.rfind("\n") + 1
        if len(text) - end >= TEXT_CHARS_MAX:
            end = len(text)
        self._begun = text[end:]
        return b"".join(self._events(text[:end]))

    def rest(self) -> bytes:
        begun, self._begun = self._begun, ""
        return b"".join(self._events(begun + self._decoder.decode(b"", final=True)))

    def _events(self, text: str) -> Iterator[bytes]:
        """Each with as many whole lines as a pipe takes at once."""
        chars_max = TEXT_CHARS_MAX
        while text:
            piece = text[: chars_max if len(text) <= chars_max else text.rfind("\n", 0, chars_max) + 1 or chars_max]
            # Event: What a worker printed.
            event = json_line("output", **self._label, stream=self._stream, text=piece.removesuffix("\n"))
            if len(event) > select.PIPE_BUF and len(piece) > 1:
                chars_max = len(piece) // 2
                continue
            yield copied(event)
            text, chars_max = text[len(piece) :], TEXT_CHARS_MAX


class OutputStream:
    """One standard stream of the hub, and the pipes of all workers whose output goes there."""

    def __init__(self, loop: Loop, descriptor: int, as_events: bool) -> None:
        self._as_events = as_events
        self._events: dict[int, OutputEvents] = {}  # of each pipe, where it is as events
        self._name = {1: "stdout", 2: "stderr"}[descriptor]
        self._loop, self._poller = loop, loop.poller
        self._writer = writer_to(descriptor, as_events)
        self._tails: dict[int, bytearray] = {}  # the last bytes of each pipe
        # Read from pipes and not yet written; while there is any, no pipe is read, and what prints may have to wait.
        self.held = b""
        self._given_up = False
        self._end_patience = partial(self._on_room, expired=True)
        self._dropped = 0  # bytes, not logged yet: the stream had no reader, or one that reads nothing
        self._pipes, self._room = select.epoll(), select.epoll()
        self._poller.register(self._pipes.fileno(), self.on_ready)
        self._poller.register(self._room.fileno(), self.on_ready)

    def add(self, pipe: int, tail: bytearray, label: Mapping[str, Any]) -> None:
        """Begin to read this pipe, which must not block; ``tail`` has the last bytes of it from now on."""
        # Events of what is read have ``label``, as it is then.
        self._pipes.register(pipe, select.EPOLLIN)
        self._tails[pipe] = tail
        if self._as_events:
            self._events[pipe] = OutputEvents(self._name, label)

    def remove(self, pipe: int) -> None:
        self.drain(pipe)
        self._forget(pipe)

    def drain(self, pipe: int) -> None:
        left = DRAIN_BYTES_MAX
        while pipe in self._tails and left > 0 and (read := self._read(pipe)):
            left -= read

    def _forget(self, pipe: int) -> None:
        if self._tails.pop(pipe, None) is not None:
            self._pipes.unregister(pipe)
            if self._as_events:
                self._write(self._events.pop(pipe).rest())

    def on_ready(self, descriptor: int) -> None:
        if descriptor == self._room.fileno():
            self._on_room()
            return
        for pipe, _ in self._pipes.poll(0, PIPES_PER_TURN):
            self._read(pipe)
            if self.held:
                return

    def _read(self, pipe: int) -> int:
        try:
            chunk = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return 0
        if not chunk:
            self._forget(pipe)  # the worker and its children have closed their ends
            return 0
        tail = self._tails[pipe]
        tail += chunk
        del tail[:-TAIL_BYTES]
        self._write(self._events[pipe].lines(chunk) if self._as_events else chunk)
        return len(chunk)

    def _write(self, chunk: bytes) -> None:
        taken = 0 if self.held else self._writer.write(chunk)
        rest = chunk[taken:]
        if not rest:
            self._log_dropped()
        elif self._given_up or self._writer.gone or len(self.held) + len(rest) > HELD_BYTES_MAX:
            self._dropped += len(rest)
        elif self.held:
            self.held += rest
        else:
            self.held = rest
            self._poller.unregister(self._pipes.fileno())
            with contextlib.suppress(OSError):  # epoll takes no file; the end of the patience ends the pause
                self._room.register(self._writer.descriptor, select.EPOLLOUT)
            self._end_patience_in(PATIENCE_S)

    def _end_patience_in(self, seconds: float) -> None:
        self._loop.schedule.set(self._end_patience, self._loop.clock.now_s() + seconds)

    def _on_room(self, expired: bool = False) -> None:
        taken = self._writer.write(self.held)
        self.held = self.held[taken:]
        if self.held and (self._writer.gone or (expired and not taken)):
            self._given_up = True
            self._dropped += len(self.held)
            self.held = b""
        if self.held:
            if taken:
                self._end_patience_in(PATIENCE_S)
            return
        with contextlib.suppress(OSError):
            self._room.unregister(self._writer.descriptor)
        self._end_patience_in(math.inf)
        self._poller.register(self._pipes.fileno(), self.on_ready)

    def _log_dropped(self) -> None:
        self._given_up = False
        if self._dropped:
            # Event: What workers printed is lost, since the hub's stream was not read.
            log.warning("output_dropped", stream=self._name, bytes=self._dropped)
            self._dropped = 0

    def close(self) -> None:
        self._end_patience_in(math.inf)
        deadline_s = time.monotonic() + LAST_S
        while self.held and not self._writer.gone and (left_s := deadline_s - time.monotonic()) > 0:
            self._room.poll(left_s)
            self.held = self.held[self._writer.write(self.held) :]
        for waited in (self._pipes, self._room):
            self._poller.unregister(waited.fileno())
            waited.close()


Streams = tuple[OutputStream, OutputStream]  # the hub's stdout and stderr


class WorkerOutput:
    """The stdout and stderr of one worker."""

    def __init__(self, streams: Streams, pipes: Sequence[int] = ()) -> None:
        """Read these pipes, whose owner this is from now on, or make one to each of the hub's two streams."""
        self._tails = bytearray(), bytearray()
        self._readers: list[tuple[OutputStream, int]] = [*zip(streams, pipes, strict=False)]
        self.far_ends: list[int] = []  # the worker's ends of the pipes that this has made; closed by ``close_far_ends``
        self.label: dict[str, Any] = {}  # who it is, in events of what it prints; may change
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for stream in streams if not pipes else ():
                ours, theirs = os.pipe()
                self.far_ends.append(theirs)
                self._readers.append((stream, ours))
                os.set_blocking(ours, False)
            for (stream, pipe), tail in zip(self._readers, self._tails, strict=True):
                stream.add(pipe, tail, self.label)
            undo.pop_all()

    @property
    def is_paused(self) -> bool:
        """True while the hub does not read all of it, and the worker may have to wait until it can print."""
        return any(stream.held for stream, _ in self._readers)

    @property
    def tail(self) -> str:
        # The order of the two is unknown. Stderr comes last, since a stack that the hub asked for must be at the end.
        for stream, pipe in self._readers:
            stream.drain(pipe)
        return b"".join(self._tails)[-TAIL_BYTES:].decode("utf-8", "backslashreplace")

    def close_far_ends(self) -> None:
        for descriptor in self.far_ends:
            os.close(descriptor)
        self.far_ends.clear()

    def close(self) -> None:
        self.close_far_ends()
        for stream, pipe in self._readers:
            stream.remove(pipe)
            os.close(pipe)
        self._readers.clear()
