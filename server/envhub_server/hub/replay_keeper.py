"""Keeps what an env was asked until it failed, in a file: made from the journal of its worker's process.

The hub's loop copies what will be gone in a moment; ``ReplayWriter`` reads it, and writes the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from envhub.arena.layout import Layout
from envhub.protocol.messages import Faults, as_map
from envhub_server.hub.replay_writer import ReplayWriter
from envhub_server.hub.session_observer import Recipient, SessionObserver
from envhub_server.ipc import control, replay_file
from envhub_server.ipc.journal import Journal, JournalCopy, JournalLayout, allocate
from envhub_server.ipc.replay_file import Replay
from envhub_server.log import Logger
from envhub_server.memory.session_memory import SessionMemory
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.session.instructions import KeepReplay

log = Logger("envhub.hub")


@dataclass
class ReplayKeeper(SessionObserver):
    """Has the replays of one session written.

    Attributes:
        writer: the hub's.
        session: its number.
        interpreter: of its workers.
        faults: what the session does about envs that fail.
        journals: of the processes, by number.
        built: what each process said of its envs, by number.
        first_spec: the ``plain_spec`` of the session's first env.
    """

    writer: ReplayWriter
    session: int
    interpreter: InterpreterKey
    faults: Faults
    journals: dict[int, Journal] = field(default_factory=dict)
    built: dict[int, control.Built] = field(default_factory=dict)
    first_spec: bytes = b""

    def worker_built(self, process: int, built: control.Built) -> None:
        """Note what this process says of its envs."""
        self.built[process] = built
        if built.action_space:  # only the first worker describes the session's spaces
            self.first_spec = built.plain_spec or b""

    def arena_given(
        self, recipient: Recipient, message: control.MapArena
    ) -> tuple[control.MapArena, Mapping[str, int]]:
        """Have a process that has no journal begin one."""
        if recipient.process in self.journals:
            return message, {}
        try:
            descriptor = self._make_journal(recipient.process, len(recipient.rows), recipient.layout)
        except OSError as error:
            # Event: A worker keeps no journal, so that its failures have no replays.
            recipient.log.warning("journal_not_made", worker=recipient.slot, why=str(error))
            return message, {}
        return replace(message, journal=True), {"journal": descriptor}

    def _make_journal(self, process: int, rows: int, layout: Layout) -> int:
        """The memory of a journal for a process with this number of rows; the caller owns it.

        Raises:
            OSError: there is no memory or descriptor left.
        """
        wanted = JournalLayout(rows, layout.observations, layout.actions)
        descriptor = allocate(wanted)
        try:
            self.journals[process] = Journal(wanted, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def rows_lost(self, process: int, why: str) -> None:
        """Forget the journal of a process that has ended; its replay has been taken from it."""
        self.journals.pop(process, None)

    def process_ended(self, process: int, why: str) -> None:
        """Forget a process."""
        self.journals.pop(process, None)
        self.built.pop(process, None)

    def session_ended(self) -> None:
        """Forget the journals: else replays that wait to be written would hold them."""
        self.journals.clear()

    def env_failed(
        self, wanted: KeepReplay, rows: Sequence[int], memory: SessionMemory, output: str, client: str
    ) -> None:
        """Have the file of an env of this process, which has these rows, written soon; what is not is logged."""
        row, at_work = wanted.row, True
        if row is None:
            progress = memory.progress(wanted.slot)
            row, at_work = progress.row, bool(progress.kind)
        journal = self.journals.get(wanted.process)
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
        built = self.built[wanted.process]  # it had a journal, so it had made its envs
        packed = partial(self._packed, wanted, row, copy, at_work, built, output, client)
        return self.writer.write(self.session, wanted.failure.replay, copy.nbytes, packed)

    def _log_not_kept(self, wanted: KeepReplay, why: str) -> None:
        # Event: The replay of a failure is not kept.
        log.warning("replay_not_kept", once_per=("why",), replay=wanted.failure.replay, why=why)

    def _packed(
        self,
        wanted: KeepReplay,
        row: int,
        journal: JournalCopy,
        at_work: bool,
        built: control.Built,
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
            limits={"init": self.faults.init_s, "reset": self.faults.reset_s, "step": self.faults.step_s},
            spec=self.first_spec if built.plain_spec is None else built.plain_spec,
            memory_max=wanted.memory_max or 0,
            client=client,
            failed_at=calls if answered else max(0, calls - 1),
            history={**as_map(history), "notes": [list(note) for note in history.notes]},
        )
        return replay_file.pack(replay)
