"""Keeps the replays of sessions: a trace for each worker, and a file of each env that failed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envhub.env_failure import EnvFailure
from envhub.protocol.messages import as_map
from envhub.values.leaf import Leaf
from envhub_server.ipc import control, replay_file
from envhub_server.ipc.replay_file import Replay, Trace, allocate, layout_of
from envhub_server.log import Logger, log
from envhub_server.loop import BackgroundThread, Poller
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.replay import bytes_in, keep
from envhub_server.session.launcher import Launcher
from envhub_server.session.slots import Slot

WAITING_MAX = 16  # replays to be written
CLOSE_S = 2.0  # for what waits to be written when the hub ends


class ReplayWriter:
    """Writes the files of one hub in a thread, for the disk may be slow."""

    def __init__(self, folder: Path, bytes_max: int, poller: Poller) -> None:
        """Write into this folder, which is made with the first file."""
        self._folder, self.bytes_max = folder, bytes_max
        self.nbytes = bytes_in(folder)  # of all files there, when this hub began or wrote the last one
        self._thread = BackgroundThread(poller, "envhub-replays")

    def write(self, name: str, replay: Replay) -> None:
        if self._thread.waiting.qsize() >= WAITING_MAX:
            not_kept(name, f"{WAITING_MAX} others wait to be written")
            return
        failed: list[str] = []

        def work() -> None:
            try:
                keep(self._folder, name, replay_file.pack(replay), self.bytes_max)
                self.nbytes = bytes_in(self._folder)
            except Exception as error:  # of what foreign code has written, too
                # The whole text of the former has the file's name, which is another one each time.
                failed.append(error.strerror if isinstance(error, OSError) and error.strerror else str(error))

        def done() -> None:  # in the loop, which has the log
            for why in failed:
                not_kept(name, why)

        with contextlib.suppress(RuntimeError):  # of threads there are no more
            self._thread.do(work, done)

    def close(self) -> None:
        """Wait for a moment until all is written."""
        self._thread.finish(CLOSE_S)


def not_kept(name: str, why: str) -> None:
    # Event: The replay of a failure is not kept.
    log.warning("replay_not_kept", once_per=("why",), replay=name, why=why)


@dataclass
class ReplayKeeper:
    """Has the replays of one session written."""

    writer: ReplayWriter  # the hub's
    interpreter: InterpreterKey  # of the session's workers
    is_vector: bool  # whether each worker's envs are one vector env
    trace_bytes_max: int
    traces: dict[int, Trace] = field(default_factory=dict)  # by number of a process
    built: dict[int, control.Built] = field(default_factory=dict)  # what each process said of its envs, by number
    first_spec: bytes = b""  # the ``plain_spec`` of the session's first env

    def worker_built(self, process: int, built: control.Built) -> None:
        self.built[process] = built
        if built.action_space:  # only the first worker describes the session's spaces
            self.first_spec = built.plain_spec or b""

    def process_forked(self, process: int, by: int) -> None:
        self.built[process] = self.built[by]

    def begin_trace(self, process: int, slot: Slot, actions: Sequence[Leaf], log: Logger) -> int | None:
        """Begin the trace of a process that has none; the descriptor, which the caller closes."""
        if process in self.traces:
            return None
        layout = layout_of(len(slot.rows), self.is_vector, actions, self.trace_bytes_max)
        try:
            descriptor = allocate(layout)
            self.traces[process] = Trace(layout, descriptor)
        except OSError as error:
            # Event: A worker keeps no trace, so that its failures have no replays.
            log.warning("trace_not_made", worker=slot.index, why=str(error))
            return None
        return descriptor

    def process_ended(self, process: int) -> None:
        self.traces.pop(process, None)
        self.built.pop(process, None)

    def env_failed(
        self, launcher: Launcher, slot: Slot, process: int, failure: EnvFailure, row: int, trace: bytes
    ) -> None:
        """Have the file of an env of this process of the slot written soon; what is not is logged."""
        if process not in self.traces:
            return not_kept(failure.replay, "its worker had no trace")
        order, arena = launcher.order(slot), launcher.arena
        assert arena is not None
        if order.batch_workers:
            row = slot.rows[0]
        position = slot.rows.index(row)
        try:
            trace = trace or self.traces[process].taken(0 if order.batch_workers else position)
        except ValueError as error:
            return not_kept(failure.replay, str(error))
        built = self.built[process]  # it had a trace, so it had made its envs
        source = built.sources[position] if position < len(built.sources) else b""
        build, lacks = replay_file.plain(order, row, source)
        key, faults = self.interpreter, launcher.make.faults
        replay = Replay(
            build=as_map(replace(build, sys_path=built.sys_path, cwd=built.cwd)),
            mapped=as_map(arena),
            lacks=lacks,
            python=key.python or sys.executable,
            variables=dict(key.variables),
            ld_library_path=list(key.ld_library_path),
            cause=failure.cause,
            message=failure.message,
            exception=failure.exception,
            ended=failure.signal or ("" if failure.exit_status is None else f"status {failure.exit_status}"),
            limits_s={"init": faults.init_s, "reset": faults.reset_s, "step": faults.step_s},
            memory_max=launcher.rules.hosting.memory_max or 0,
            spec=self.first_spec if built.plain_spec is None else built.plain_spec,
            trace=trace,
        )
        return self.writer.write(failure.replay, replay)
