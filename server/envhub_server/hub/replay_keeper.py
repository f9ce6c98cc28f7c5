"""Keeps what an env was asked until it failed, in a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from envhub.protocol.messages import Faults, as_map
from envhub_server.catalog.replay_folder import ReplayFolder
from envhub_server.ipc import control, replay_file
from envhub_server.ipc.replay_file import Replay
from envhub_server.memory.journals import Journals
from envhub_server.memory.session_memory import SessionMemory
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.session.instructions import KeepReplay

log = structlog.get_logger("envhub.hub")


@dataclass
class ReplayKeeper:
    """Writes the replays of one session.

    Attributes:
        folder: where to.
        interpreter: of its workers.
        journals: of its workers.
        built: what each worker said of its envs last, by worker.
    """

    folder: ReplayFolder
    interpreter: InterpreterKey
    journals: Journals
    built: dict[int, control.Built]

    def keep(self, wanted: KeepReplay, rows: Sequence[int], memory: SessionMemory, faults: Faults, output: str) -> None:
        """Write the file of an env of this worker, which has these rows; logs why if it cannot."""
        name = wanted.failure.replay
        try:
            self.folder.keep(name, replay_file.pack(self._made(wanted, rows, memory, faults, output)))
        except (OSError, ValueError, TypeError) as error:
            log.warning("replay_not_kept", replay=name, why=str(error))

    def _made(
        self, wanted: KeepReplay, rows: Sequence[int], memory: SessionMemory, faults: Faults, output: str
    ) -> Replay:
        row, at_work = wanted.row, True
        if row is None:
            progress = memory.progress(wanted.worker)
            row, at_work = progress.row, bool(progress.kind)
        history = self.journals.history(wanted.worker, rows, row, wanted.tick)
        history, lacking = replay_file.without_pickles(history)
        position = list(rows).index(row)
        built = self.built[wanted.worker]  # it had a journal, so it had made its envs
        sources = built.sources
        build, lacks = replay_file.plain(wanted.build, row, sources[position] if position < len(sources) else b"")
        build = replace(build, sys_path=built.sys_path, cwd=built.cwd)
        calls = len(history.kinds)
        answered = wanted.row is None and (not at_work or history.digested == calls)
        failure = wanted.failure if wanted.failure.log_tail else replace(wanted.failure, log_tail=output)
        return Replay(
            build=as_map(build),
            mapped=as_map(wanted.mapped),
            row=row,
            source=sources[position] if position < len(sources) else b"",
            lacks=[*lacks, *lacking],
            interpreter=self._interpreter(),
            versions=built.versions,
            failure=_texts(dict(failure)),
            limits={"init": faults.init_s, "reset": faults.reset_s, "step": faults.step_s},
            spec=built.plain_spec,
            memory_max=wanted.memory_max or 0,
            failed_at=calls if answered else max(0, calls - 1),
            history={**as_map(history), "notes": [list(note) for note in history.notes]},
        )

    def _interpreter(self) -> dict[str, Any]:
        key = self.interpreter
        return {
            "python": key.python or sys.executable,
            "variables": dict(key.variables),
            "ld_library_path": list(key.ld_library_path),
        }


def _texts(failure: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in failure.items() if name != "replay"}
