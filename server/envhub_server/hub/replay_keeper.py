"""Keeps what an env was asked until it failed, in a file: made from the journal of its worker's process.

The hub's loop copies what will be gone in a moment; ``ReplayWriter`` reads it, and writes the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from envhub.arena.layout import Layout
from envhub.protocol.messages import Faults, as_map
from envhub_server.hub.replay_writer import ReplayWriter
from envhub_server.ipc import control, replay_file
from envhub_server.ipc.journal import Journal, JournalCopy, JournalLayout, allocate
from envhub_server.ipc.replay_file import Replay
from envhub_server.log import Logger
from envhub_server.memory.session_memory import SessionMemory
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.session.instructions import KeepReplay

log = Logger("envhub.hub")


@dataclass
class ReplayKeeper:
    """Has the replays of one session written.

    Attributes:
        writer: the hub's.
        session: its number.
        interpreter: of its workers.
        journals: of the workers' processes, by worker.
        built: what each worker said of its envs last, by worker.
        first_spec: the ``plain_spec`` of the session's first env.
    """

    writer: ReplayWriter
    session: int
    interpreter: InterpreterKey
    journals: dict[int, Journal] = field(default_factory=dict)
    built: dict[int, control.Built] = field(default_factory=dict)
    first_spec: bytes = b""

    def note(self, worker: int, built: control.Built) -> None:
        """Note what this worker says of its envs."""
        self.built[worker] = built
        if built.action_space:  # only the first worker describes the session's spaces
            self.first_spec = built.plain_spec or b""

    def make_journal(self, worker: int, rows: int, layout: Layout) -> int | None:
        """The memory of a journal for the new process of this worker, of so many rows; the caller owns it.

        None if the process has one already.

        Raises:
            OSError: there is no memory or descriptor left.
        """
        if worker in self.journals:
            return None
        wanted = JournalLayout(rows, layout.observations, layout.actions)
        descriptor = allocate(wanted)
        try:
            self.journals[worker] = Journal(wanted, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def swap(self, worker: int, spare: int) -> None:
        """What is kept of a spare's process is this worker's from now on; that of the worker's own is over."""
        self.journals.pop(worker, None)
        if spare in self.journals:
            self.journals[worker] = self.journals.pop(spare)
        self.built[worker] = self.built.pop(spare)

    def keep(
        self,
        wanted: KeepReplay,
        rows: Sequence[int],
        memory: SessionMemory,
        faults: Faults,
        output: str,
        client: str,
    ) -> None:
        """Have the file of an env of this worker, which has these rows, written soon; what is not is logged."""
        row, at_work = wanted.row, True
        if row is None:
            progress = memory.progress(wanted.worker)
            row, at_work = progress.row, bool(progress.kind)
        journal = self.journals.get(wanted.worker)
        if journal is None:
            return self._log_not_kept(wanted, "its worker had no journal")
        row = rows[0] if wanted.build.shares else row
        first = list(rows).index(row)
        positions = range(first, first + (len(rows) if wanted.build.shares else 1))
        nbytes, nbytes_max = journal.layout.row_bytes * len(positions), replay_file.HISTORY_BYTES_MAX
        if nbytes > nbytes_max:
            why = f"the journal has {nbytes} bytes of the env; a file holds at most {nbytes_max}"
            return self._log_not_kept(wanted, why)
        copy = journal.copied(positions)
        built = self.built[wanted.worker]  # it had a journal, so it had made its envs
        packed = partial(self._packed, wanted, row, copy, at_work, built, faults, output, client)
        return self.writer.write(self.session, wanted.failure.replay, copy.nbytes, packed)

    def _log_not_kept(self, wanted: KeepReplay, why: str) -> None:
        log.warning("replay_not_kept", replay=wanted.failure.replay, why=why)

    def _packed(
        self,
        wanted: KeepReplay,
        row: int,
        journal: JournalCopy,
        at_work: bool,
        built: control.Built,
        faults: Faults,
        output: str,
        client: str,
    ) -> bytes:
        """The bytes of the file; runs in the writer's thread.

        Args:
            wanted: the failure.
            row: of the env; the first of a vector env.
            journal: of it, or of all envs of a vector env.
            at_work: whether the worker was executing a call of it.
            built: what the worker said of its envs.
            faults: the session's.
            output: of the worker.
            client: the name of the session's client.

        Raises:
            ValueError: the journal is damaged, or has more of the env than a file can hold.
        """
        history, lacking = replay_file.without_pickles(journal.history(None if wanted.tick < 0 else wanted.tick))
        position, key, calls = journal.positions[0], self.interpreter, history.calls
        source = built.sources[position] if position < len(built.sources) else b""
        build, lacks = replay_file.plain(wanted.build, row, source)
        answered = wanted.row is None and (not at_work or history.digested == calls)
        failure = wanted.failure if wanted.failure.log_tail else replace(wanted.failure, log_tail=output)
        replay = Replay(
            build=as_map(replace(build, sys_path=built.sys_path, cwd=built.cwd)),
            mapped=as_map(wanted.mapped),
            row=row,
            source=source,
            lacks=[*lacks, *lacking],
            interpreter={
                "python": key.python or sys.executable,
                "variables": dict(key.variables),
                "ld_library_path": list(key.ld_library_path),
            },
            versions=built.versions,
            failure={name: value for name, value in dict(failure).items() if name != "replay"},
            limits={"init": faults.init_s, "reset": faults.reset_s, "step": faults.step_s},
            spec=self.first_spec if built.plain_spec is None else built.plain_spec,
            memory_max=wanted.memory_max or 0,
            client=client,
            failed_at=calls if answered else max(0, calls - 1),
            history={**as_map(history), "notes": [list(note) for note in history.notes]},
        )
        return replay_file.pack(replay)
