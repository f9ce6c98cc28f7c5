"""The program's end of a recording: it hands batches of steps over to the process that writes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envhub.process import blocked
from envhub.transport.address import environment
from envhub.transport.descriptors import new_memory
from envhub.values import codec
from envhub_client.record_options import Recorded
from envhub_client.recording.episodes import BATCHES, Note, StepBatch, batches_of, mapped
from envhub_client.recording.process import MESSAGE_BYTES_MAX, give_up, share_cpu

START_S = 60.0  # for the process to import what it needs
WRITE_S = 60.0  # for it to write what it has, once the recording is closed
END_S = 5.0  # for it to end then
HANDED_OVER_S = 1.0  # after this long a batch is handed over though it is not full

# The empty entry comes first in its path: the process must not find a minari.py of the folder in which it starts.
_BOOT = "import sys; sys.path[:] = filter(None, sys.path); from envhub_client.recording.process import main; main({})"

log = logging.getLogger("envhub")


class StepWriter:
    """Writes batches for a process, which it starts. The caller fills row ``at`` of ``batch``, and completes it."""

    def __init__(self, folder: Path) -> None:
        """Start the process, which is to write into this new folder."""
        self.opened = False  # the process was told what is recorded
        self.records = False  # it takes steps, until it has said that nothing more is recorded
        self.batch: StepBatch | None = None
        self.at = 0
        self.recorded = Recorded(folder)
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._free = [*range(BATCHES)]
        self._notes: list[tuple[int, int, Note]] = []
        # An interrupt may come between any two lines. A batch whose handing over it broke off is handed over again,
        # with the same number, by which the process knows it.
        self._number, self._index, self._is_full, self._due_s = -1, 0, False, 0.0
        try:
            with other, blocked():  # it ends once its program has, and everything is written
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT.format(other.fileno())],
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**environment(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        except BaseException:
            self._line.close()
            raise

    def open(self, setup: Mapping[str, Any], step: np.dtype[Any], queue_bytes: int) -> None:
        """Tell the process what is recorded, and wait until it is ready."""
        self._steps, nbytes = batches_of(step, queue_bytes)
        memory = new_memory("envhub-recording", nbytes)
        try:
            self._batches = mapped(memory, step, self._steps)
            self.opened = self.records = True
            self._send(b"setup", codec.encode({**setup, "steps": self._steps}, codec.as_repr), [memory])
        finally:
            os.close(memory)
        self.read_answers(START_S)

    def ready(self) -> bool:
        """True if there is room for a step in ``batch``."""
        if self._is_full:
            self.hand_over()
        if self.batch is None and self.records:
            self.read_answers()
            if self.records and self._free:
                self._number += 1
                self._index, self.at = self._free.pop(), 0
                self._due_s = time.monotonic() + HANDED_OVER_S
                self.batch = self._batches[self._index]
        return self.batch is not None

    def note(self, row: int, note: Note) -> None:
        self._notes.append((self.at, row, note))

    def complete_step(self) -> None:
        self.at += 1
        if self.at == self._steps or time.monotonic() > self._due_s:
            self.hand_over()

    def hand_over(self) -> None:
        self._is_full = True
        order = {"number": self._number, "batch": self._index, "steps": self.at}
        self._send(codec.encode(order), codec.encode(self._notes))
        self.batch, self._notes = None, []
        self._is_full = False

    def read_answers(self, wait_s: float = 0.0) -> None:
        """Take what the process has said; where it has said nothing, wait for up to ``wait_s`` for one answer."""
        while self.records:
            try:
                self._line.settimeout(wait_s)
                message = self._line.recv(MESSAGE_BYTES_MAX)
            except ConnectionResetError:  # it has ended, and had not read everything; what it said before follows
                continue
            except (BlockingIOError, TimeoutError):
                return
            answer = codec.decode(message) if message else None
            if answer is None:
                self._lose("its process has ended")
                return
            counts = (answer[name] for name in Recorded._fields[1:])
            self.recorded, self.records, wait_s = Recorded(self.recorded.folder, *counts), not answer["closed"], 0.0
            if answer["batch"] is not None:
                self._free.append(answer["batch"])
        self.batch = None

    def end(self, missed: Sequence[int] = ()) -> None:
        """Hand over what is complete, and have the process end; ``missed`` counts, by row, the last episodes."""
        if self.batch is not None and (self.at or self._is_full):
            self.hand_over()
        if self.records and self._process.poll() is None:
            share_cpu(self._process.pid)
            with contextlib.suppress(OSError):
                self._line.send(codec.encode({"missed": [*missed]}))

    def close(self) -> None:
        """Wait until everything is written, which follows ``end``, and say what was not."""
        deadline_s = time.monotonic() + WRITE_S
        try:
            while self.records and (left_s := deadline_s - time.monotonic()) > 0:
                self.read_answers(left_s)
        finally:
            self._line.close()  # at which it ends, if it has not
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self.records:
                self._lose("its process did not end in time")
        if not self.opened:
            self.recorded.folder.rmdir()  # nothing was reset, and nothing is in it
        folder, episodes, nbytes, dropped, ended = self.recorded
        text = "%d episodes (%s bytes) are recorded in %s; %d were dropped%s"
        why = f"; none was recorded after that: {ended}" if ended else ""
        log.log(
            logging.WARNING if dropped or ended else logging.INFO, text, episodes, f"{nbytes:,}", folder, dropped, why
        )

    def _send(self, message: bytes, attached: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with what is too large for one behind a descriptor of its own; nothing once it has ended."""
        memory = os.memfd_create("envhub-recording-notes")
        try:
            os.pwrite(memory, attached, 0)
            socket.send_fds(self._line, [message], [memory, *descriptors])
        except (BrokenPipeError, ConnectionResetError):
            self.read_answers()
        finally:
            os.close(memory)

    def _lose(self, why: str) -> None:
        """Record nothing more: the process has ended by itself. Count what it has written."""
        self.records, self.batch = False, None
        recorded = self.recorded._replace(ended=why)
        counts = {name: getattr(recorded, name) for name in Recorded._fields[1:]}
        self.recorded = recorded._replace(**give_up(recorded.folder, counts))
        log.warning("nothing more is recorded in %s: %s", recorded.folder, why)
