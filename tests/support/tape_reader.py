"""Reads the tape of a recorder, in place of the process that writes."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from envhub.recording.episodes import Episode, EpisodeCutter
from envhub.recording.tape import Tape, TapeShape
from envhub.values import codec


class TapeReader:
    """Cuts the episodes of all blocks out of a tape, as far as it is told to read.

    Attributes:
        episodes: those that have ended.
        notes: what the recorder noted, in its order.
    """

    def __init__(self, end: socket.socket) -> None:
        """Read what comes by this end of the recorder's line, whose tape has been sent."""
        self._end = end
        message, (descriptor,), *_ = socket.recv_fds(end, 1 << 17, 1)
        self._tape = Tape(TapeShape.from_wire(codec.decode(message)["shape"]), descriptor)
        os.close(descriptor)
        self._cutter = EpisodeCutter(self._tape.shape, [*range(self._tape.shape.places)], {}, lambda *_: None)
        self.episodes: list[Episode] = []
        self.notes: list[Any] = []
        end.setblocking(False)

    def read(self) -> None:
        """Take all blocks that have come, and give them back."""
        with contextlib.suppress(BlockingIOError):
            while message := self._end.recv(1 << 17):
                order = codec.decode(message)
                notes = {(step, place): note for step, place, note in order["notes"]}
                self.notes += notes.values()
                block = self._tape.blocks[order["block"]]
                self.episodes += self._cutter.take(block, order["steps"], notes, order["left"])
                counts = {"episodes": 0, "nbytes": 0, "dropped": 0, "ended": ""}
                with contextlib.suppress(BrokenPipeError):  # the recorder has closed the line
                    self._end.send(codec.encode({"block": order["block"], "counts": counts, "closed": False}))

    def cut_all(self) -> None:
        """The episodes under way end."""
        self.episodes += self._cutter.cut_all(missing=bool(self._tape.words[2]))
