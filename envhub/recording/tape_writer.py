"""The end of a line at which a tape is written: its blocks, and their exchange with the process that reads them.

Runs on Python 3.8 and later, in workers too.
"""

from __future__ import annotations

import array
import os
import socket
import time
from typing import Any, Callable

from envhub.recording.tape import BLOCKS, MANY, Block, TapeShape, new_tape
from envhub.values import codec

CLOSE_S = 1.0  # for the other process to take the last block
HANDED_OVER_S = 1.0  # after this long a block is handed over though it is not full
MESSAGE_BYTES_MAX = 1 << 16
NOTES_BYTES_MAX = 1 << 16  # of a block: seeds, and texts of failures
NOTE_BYTES = 20  # of the numbers of a note


class TapeWriter:
    """Writes the blocks of one tape, and hands them over.

    The caller fills step ``at`` of ``block``, and calls ``complete_step``.

    Attributes:
        records: whether steps are recorded: from ``open`` on until something ends it.
        opened, closed: whether there is, or was, a tape; whether the other process reads no more.
        counts: of the other process, as it sent them last.
        block: the block that is written; None for none.
        at, end: the step of the block that is written next, and their number.
        free: the numbers of the blocks that can be taken.
    """

    def __init__(self, line: socket.socket, on_lost: Callable[[], None]) -> None:
        """Use this line, which ``close`` closes; ``on_lost`` is called once the other process has ended by itself."""
        self.line, self._on_lost = line, on_lost
        self.records = self.opened = self.closed = False
        self.counts: dict[str, Any] = {"episodes": 0, "nbytes": 0, "dropped": 0, "ended": ""}
        self.block: Block | None = None
        self.at, self.end = 0, 0
        self.free = [*range(BLOCKS)]
        self._number, self._due_s, self._left = -1, 0.0, BLOCKS  # how many blocks were left when this one was taken
        self._notes: list[tuple[int, int, int | str]] = []
        self._note_bytes = 0

    def open(self, shape: TapeShape, wait_s: float) -> None:
        """Make the tape, and wait for up to ``wait_s`` for the other process.

        Raises:
            OSError: there is no memory.
        """
        self._tape, descriptor = new_tape(shape)
        self.records = self.opened = True
        rights = array.array("i", [descriptor]).tobytes()
        try:
            message = codec.encode({"shape": shape.wire()})
            self.line.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError as error:
            self._lose(error)
        finally:
            os.close(descriptor)
        if not self.closed:
            self.read_answers(wait_s)

    # --- steps --------------------------------------------------------------------------------------------------------

    def take_block(self) -> bool:
        """Begin another block; False if there is none."""
        self.read_answers()
        if self.block is not None or not self.free or not self.records:
            return False
        self._number = self.free.pop()
        self.block, self.at, self.end = self._tape.blocks[self._number], 0, self._tape.shape.steps
        self.block.marks[:] = 0
        self._left = len(self.free)
        self._due_s = time.monotonic() + HANDED_OVER_S
        self._tape.begin(self._number)
        return True

    def note(self, place: int, note: int | str | None) -> None:
        """Add a seed or a text to an env of the next step, if there is room."""
        nbytes = NOTE_BYTES + (len(note.encode()) if isinstance(note, str) else 0)
        if note is not None and self.at < self.end and self._note_bytes + nbytes <= NOTES_BYTES_MAX:
            self._note_bytes += nbytes
            self._notes.append((self.at, place, note))

    def complete_step(self) -> bool:
        """Complete the step; True if the block is to be handed over."""
        self.at = self._tape.words[1] = self.at + 1
        # Notes are not in the tape, and are lost if this process is killed. Where few blocks are free they wait.
        noted = bool(self._notes) and len(self.free) >= MANY
        return noted or self.at == self.end or time.monotonic() > self._due_s

    def note_missing(self, missing: bool) -> None:
        """Tell the other process whether steps after the last one are missing."""
        self._tape.words[2] = missing

    # --- the other process --------------------------------------------------------------------------------------------

    def pass_block(self, dropped: int, close: bool = False) -> None:
        """Give the block to the other process, which gives it back when it has read it.

        The block is kept if the line has no room for it. Interrupted, it may have been handed over or not.

        Args:
            dropped: how many episodes were dropped here so far.
            close: True if nothing follows.
        """
        order = {
            "block": max(0, self._number),
            "steps": self.at if self.block is not None else 0,
            "notes": [list(note) for note in self._notes],
            "close": close,
            "dropped": dropped,
            "left": self._left,
        }
        kept = self.block, self.at, self.end, self._notes, self._note_bytes
        try:
            # Before it is sent, because its steps would be read twice if this process were killed or interrupted.
            self._tape.begin(None)
            self._leave_block()
            self.line.send(codec.encode(order), 0 if close else socket.MSG_DONTWAIT)
        except OSError as error:
            self.block, self.at, self.end, self._notes, self._note_bytes = kept
            if self.block is not None:
                self._tape.begin(self._number)
                self._tape.words[1] = self.at
            if not isinstance(error, BlockingIOError):  # else the line is full of notes, and the block is kept
                self.read_answers()  # the last one says why the process has ended
                if not self.closed:
                    self._lose(error)
        except BaseException:  # Ctrl-C
            self._leave_block()
            raise

    def _leave_block(self) -> None:
        self.block, self.at, self.end, self._notes, self._note_bytes = None, 0, 0, [], 0

    def read_answers(self, wait_s: float = 0.0) -> None:
        """Take all answers that have come, and the next one for up to ``wait_s``."""
        if not self.opened:
            return
        try:
            self.line.settimeout(wait_s)
            while True:
                message = self.line.recv(MESSAGE_BYTES_MAX)
                if not message:
                    raise ConnectionResetError("its process has ended")
                answer = codec.decode(message)
                self.counts = answer["counts"]
                if answer["block"] is not None:
                    self.free.append(answer["block"])
                self.records = not (answer["closed"] or self.counts["ended"])
                if answer["closed"]:
                    self.closed = True
                    return
                self.line.settimeout(0.0)
        except (BlockingIOError, socket.timeout):  # which is no ``TimeoutError`` before Python 3.10
            return
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Continue without recording: the other process has ended."""
        self.records, self.closed = False, True
        self.counts = {**self.counts, "ended": self.counts["ended"] or f"{error}"}
        self._on_lost()

    def close(self, pass_block: Callable[[], None]) -> None:
        """Close the line, after ``pass_block`` of what is complete; nothing is recorded any more."""
        if self.line.fileno() < 0:
            return
        if self.opened and not self.closed:
            self.line.settimeout(CLOSE_S)
            pass_block()
        self.records, self.closed = False, True
        self.line.close()
