"""The recordings of a hub's sessions: for each a process that writes, and a line from every worker to it.

The process is told what to record once the session's first envs are made. Nothing here waits for it: it writes while
the session runs, and after that until everything is written, or the hub ends.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import envhub
from envhub.arena.layout import Layout
from envhub.protocol.messages import Make
from envhub.recording.options import RecordOptions
from envhub.recording.recorder_handle import RecorderHandle, setup_of, why_unrecordable
from envhub.sealing import new_memory
from envhub.values.leaf import OBJECT
from envhub_server.catalog.env_settings import EnvSettings
from envhub_server.hub.session_observer import Recipient, SessionObserver
from envhub_server.ipc import control
from envhub_server.log import Logger
from envhub_server.loop.poller import Poller

START_S = 20.0  # for which a worker of a new session waits for the process
WRITE_S = 20.0  # for what is complete, once the hub stops
WRITE_AT_ONCE_S = 2.0  # likewise, once it is told so twice
SLICE_S = 0.05  # after which a hub that waits for what is written looks at everything else
RECORDINGS_MAX = 64  # whose processes run, of all sessions of a hub and of those that have ended

log = Logger("envhub.recording")


class Recordings:
    """The recordings whose processes have not ended, with ``memory_bytes`` of at most ``memory_bytes_max`` together."""

    def __init__(self, poller: Poller, memory_bytes_max: int) -> None:
        self.poller, self._memory_bytes_max = poller, memory_bytes_max
        self.running: set[SessionRecording] = set()

    def begin(self, settings: EnvSettings, make: Make, session: str) -> SessionRecording | None:
        """Start the process for a session of this name; None if nothing is recorded; why is logged."""
        options = None if settings.recorded is None else settings.recorded.of_session(make.num_envs)
        if options is None:
            # Event: A session is not recorded.
            log.info("not_recorded", session=session, why=f"it has none of env_ids, with {make.num_envs} envs")
            return None
        if why := self._lack(options):
            log.warning("not_recorded", session=session, why=why)
            return None
        try:
            return SessionRecording(self, options, make, session)
        except OSError as error:
            log.warning("not_recorded", session=session, why=f"no process can be started: {error.strerror}")
            return None

    def _lack(self, options: RecordOptions) -> str:
        """The reason why no recording is begun next to those that run; empty if one is."""
        if len(self.running) >= RECORDINGS_MAX:
            return f"{RECORDINGS_MAX} recordings are being written"
        used, most = sum(each.options.memory_bytes for each in self.running), self._memory_bytes_max
        if used + options.memory_bytes <= most:
            return ""
        wanted = f"it takes {options.memory_bytes}, twice its queue_bytes"
        return f"{used} of recordings_memory_max={most} bytes are in use, and {wanted}"

    def close(self, wait_s: Callable[[], float]) -> None:
        """Wait until everything is written, for the seconds that are asked for again and again; sessions have ended."""
        began_s, recordings = time.monotonic(), {*self.running}
        for recording in recordings:
            recording.close()
        for recording in recordings:
            while recording.runs and time.monotonic() < began_s + wait_s():
                for each in recordings:
                    each.flush()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    recording.handle.process.wait(SLICE_S)
            recording.finish()


class SessionRecording(SessionObserver):
    """The recording of one session.

    Attributes:
        handle: the process.
        options: what is recorded.
        refused: why nothing is recorded; empty as long as something is.
    """

    def __init__(self, recordings: Recordings, options: RecordOptions, make: Make, session: str) -> None:
        """Start the process.

        Raises:
            OSError: there is no process, memory or descriptor left.
        """
        self._recordings, self.options, self._make = recordings, options, make
        self.refused = ""
        self._log = log.bind(session=session)
        self._about = {"env": make.name, "hub": platform.node(), "session": session}
        self._built: control.Built | None = None
        self._set_up = self._closed = self._end_logged = False
        self._lines: dict[int, int] = {}  # which one each process has
        self._lines_made = 0
        self._answer: dict[str, Any] = {}  # the last answer
        with contextlib.ExitStack() as undo:
            counted_bytes = make.num_envs * np.dtype(np.int64).itemsize
            self._counted = new_memory("envhub-recorded-episodes", counted_bytes)  # all workers of the session map it
            undo.callback(os.close, self._counted)
            self.handle = RecorderHandle()
            undo.callback(self._end_process)
            self.handle.control.setblocking(False)
            self._pidfd = os.pidfd_open(self.handle.process.pid)
            undo.callback(os.close, self._pidfd)
            for descriptor in (self.handle.control.fileno(), self._pidfd):
                recordings.poller.register(descriptor, self)
                undo.callback(recordings.poller.unregister, descriptor)
            undo.pop_all()
        recordings.running.add(self)

    def _end_process(self) -> None:
        self.handle.control.close()
        self.handle.process.kill()
        self.handle.process.wait()

    # --- workers ------------------------------------------------------------------------------------------------------

    def worker_built(self, process: int, built: control.Built) -> None:
        """Note what the first worker says of the session's envs."""
        if built.action_space:
            self._built = built

    def arena_made(self, layout: Layout, loose: bool) -> str:
        """Record nothing if the leaves cannot be recorded; returns why the envs cannot be filmed as is wanted."""
        if why := self._film_problem:
            return why
        if why := why_unrecordable([*layout.observations, *layout.actions, *([OBJECT] if loose else [])]):
            self.refuse(why)
        return ""

    @property
    def _film_problem(self) -> str:
        """The reason why the session's envs cannot be filmed as the operator wants; empty if they can."""
        if not self.options.film or self._built is None or self._built.render_mode == "rgb_array":
            return ""
        render_mode = self._built.render_mode
        return f'the operator has this env filmed, which needs render_mode="rgb_array"; it has {render_mode!r}'

    def refuse(self, why: str) -> None:
        """Record nothing more, and log why."""
        if not self.refused:
            self.refused = why
            self._log.warning("not_recorded", why=why)
            self._closed = True
            self.handle.give_up()

    def arena_given(
        self, recipient: Recipient, message: control.MapArena
    ) -> tuple[control.MapArena, Mapping[str, int]]:
        """Give a line to a process that has none; one of a session that is made waits until the recording is ready."""
        process, rows = recipient.process, recipient.rows
        if self.refused or self._closed or process in self._lines:
            return message, {}
        positions = [position for position, row in enumerate(rows) if row in (self.options.env_ids or ())]
        if not positions:
            return message, {}
        try:
            self._tell(message)
            numbers = [rows[position] for position in positions]
            film = [row for row in numbers if row in self.options.film]
            queue_bytes = max(1, self.options.queue_bytes // recipient.slots)
            counted = os.dup(self._counted)
            try:
                line = self.handle.add_line(self._lines_made, numbers, film, queue_bytes)
            except BaseException:
                os.close(counted)
                raise
        except OSError as error:
            self.refuse(f"{error.strerror or error}")
            return message, {}
        self._watch()
        self._lines[process] = self._lines_made
        self._lines_made += 1
        wanted = {
            "recorded": positions,
            "filmed": [list(rows).index(row) for row in film],
            "every": self.options.every,
            "env_ids": numbers,
            "queue_bytes": queue_bytes,
            "wait_s": START_S if recipient.making else 0.0,
        }
        return replace(message, recording=wanted), {"recording_line": line.detach(), "recording_counts": counted}

    def _tell(self, message: control.MapArena) -> None:
        """Tell the process, once, what is recorded."""
        if self._set_up:
            return
        built, make = self._built, self._make
        assert built is not None
        blobs = [message.observation_space, message.action_space]
        about = {
            **self._about,
            "num_envs": make.num_envs,
            "wrappers": make.wrappers,
            "autoreset_mode": make.autoreset_mode,
            "env_ids": [*(self.options.env_ids or ())],
            "versions": {**built.versions, "envhub-rl": envhub.__version__},
        }
        setup = setup_of(self.options, str(self.options.folder), False, blobs, about)
        kwargs = [each or make.kwargs for each in make.kwargs_each] or [make.kwargs]
        blobs_of = {"kwargs": kwargs, "wrapper_kwargs": make.wrapper_kwargs}
        self.handle.set_up({**setup, "plain_spec": built.plain_spec, "metadata": built.metadata, "blobs": blobs_of})
        self._set_up = True

    def slot_assigned(self, process: int) -> None:
        """Have the episodes of a process follow those of the one that served its slot."""
        self._say(self.handle.line_next, self._lines.get(process))

    def rows_lost(self, process: int, why: str) -> None:
        """End the episodes of a process that has ended."""
        self.process_ended(process, why)

    def process_ended(self, process: int, why: str) -> None:
        """End the line of a process; its episodes under way failed so, or are cut if ``why`` is empty."""
        self._say(self.handle.line_ended, self._lines.pop(process, None), why)

    def _say(self, what: Callable[..., None], line: int | None, *arguments: Any) -> None:
        """Tell the process this of a line, if there is one."""
        if line is not None and not self._closed:
            try:
                what(line, *arguments)
            except OSError as error:
                self._lose(error)
            self._watch()

    # --- the end ------------------------------------------------------------------------------------------------------

    def session_ended(self) -> None:
        """Have everything written, as ``close`` does."""
        self.close()

    def close(self) -> None:
        """Have everything written; the process ends then by itself."""
        if not self._closed:
            self._closed = True
            try:
                self.handle.close()
            except OSError:  # it has ended, which is reported by itself
                self.handle.give_up()
            self._watch()

    @property
    def runs(self) -> bool:
        """True if its process has not ended."""
        return self.handle.process.poll() is None

    def flush(self) -> None:
        """Tell the process what it could not yet be told."""
        if not self.handle.is_waiting:
            return
        try:
            self.handle.flush()
        except OSError as error:
            self._lose(error)
        self._watch()

    def _lose(self, error: OSError) -> None:
        """The process takes no more orders: it has ended, which is reported by itself, or leaves too many unread."""
        if isinstance(error, (BrokenPipeError, ConnectionResetError)):
            self.handle.give_up()
        else:
            self.refuse(f"{error.strerror or error}")

    def _watch(self) -> None:
        """Be called once there is room for orders that wait."""
        self._recordings.poller.want_writable(self.handle.control.fileno(), self.handle.is_waiting)

    def on_ready(self, descriptor: int) -> None:
        """Read what the process says, or note that it has ended."""
        if descriptor == self._pidfd:
            self.handle.process.wait()
            self.finish()
        else:
            self.flush()
            self._read()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while (answer := self.handle.answer()) is not None:
                self._answer = answer
                if refused := answer["refused"]:
                    # Event: An env of a session is not recorded.
                    self._log.warning("env_not_recorded", once_per=("session", "env"), **refused)
                if answer["ended"] and not self._end_logged:
                    self._end_logged = True
                    # Event: Nothing more of a session is recorded.
                    self._log.warning("recording_ended", folder=answer["folder"], why=answer["ended"])
            self._recordings.poller.unregister(self.handle.control.fileno())  # at its end

    def finish(self) -> None:
        """Say what was recorded, and free everything; the process has ended, or is waited for no longer."""
        if self.handle.control.fileno() < 0:
            return
        self._closed = True
        self._read()
        self.handle.give_up()
        for descriptor in (self.handle.control.fileno(), self._pidfd):
            self._recordings.poller.unregister(descriptor)
        self._recordings.running.discard(self)
        self.handle.control.close()
        os.close(self._pidfd)
        os.close(self._counted)
        answer = self._answer
        if not answer.get("closed"):
            why = "the hub ends while it is written" if self.runs else "its process has ended"
            self._log.warning("recording_ended", folder=answer.get("folder", ""), why=why)
            if not self.runs and answer.get("folder"):
                from envhub.recording.folder import amend  # which imports Gymnasium

                with contextlib.suppress(OSError):  # it has not begun
                    amend(Path(answer["folder"]), {"dropped": answer["dropped"], "ended": why})
        elif answer["folder"]:
            totals = {"nbytes": answer["nbytes"], "dropped": answer["dropped"]}
            # Event: A session's recording is complete.
            self._log.info("recorded", folder=answer["folder"], episodes=answer["episodes"], **totals)
        elif not self.refused and not answer["ended"]:
            self._log.info("not_recorded", why="no episode was to be recorded")
