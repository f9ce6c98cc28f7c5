"""Results in place of envs whose worker has ended, so that no driver waits for them.

A row's words and results are its worker's from the moment that one serves until it is reaped; then they are the hub's,
until the next process serves. ``session.failover`` says which row gets what; here it is written.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envhub.arena.memory import OP_RESET, STATUS_RAISED
from envhub.arena.stand_in import FRESH, put_info, stay, truncate, with_objects
from envhub_server.ipc import control
from envhub_server.memory.loose_parts import LooseParts
from envhub_server.memory.session_memory import SessionMemory
from envhub_server.session import failover
from envhub_server.session.failure_text import WorkerLoss
from envhub_server.session.stimuli import RowsWaiting, StandInFailed, StandInInfo, Stimulus


class StandIns:
    """Completes rows in place of the workers of one session that have ended.

    What it returns is to be reported to the session's state machine.

    Attributes:
        memory: where the rows are.
        loose: of observations, the parts that have no fixed size; None where they have no such parts.
        losses: of each worker that has ended what its rows are told.
        unrung: whether rows are done of which the driver was not told; who wakes it says so here.
    """

    def __init__(self, memory: SessionMemory, loose: LooseParts | None) -> None:
        self.memory = memory
        self.loose = loose
        self.losses: dict[int, WorkerLoss] = {}
        self.unrung = False

    def take(self, worker: int, loss: WorkerLoss, resetting: tuple[int, ...] | None) -> list[Stimulus]:
        """Complete the step of a worker that has ended; its rows are the hub's from now on."""
        first, self.losses[worker] = worker not in self.losses, loss
        if not first:
            return []
        arena, words = self.memory.arena, self.memory.words(worker)
        plan = failover.plan(words, resetting, loss.raises)
        if self.loose is not None:  # what the others may have left is not complete
            self.loose.keep(arena, words.rows[words.request == words.done].tolist())
        arena.needs_reset[words.rows] = plan.needs_reset
        self.unrung = True  # it may have ended after its last row was done and before it rang
        return [*self._lose(plan.lost, loss), *self._keep(plan.kept)]

    def posted(self, worker: int) -> list[Stimulus]:
        """Complete those of the steps that may have been posted to the worker that tell of its end."""
        loss = self.losses.get(worker)
        if loss is None:
            return []
        lost, waiting = failover.posted(self.memory.words(worker))
        reports = self._lose(lost, loss)
        return [*reports, RowsWaiting(worker)] if waiting.size else reports

    def finish(self, worker: int, loss: WorkerLoss) -> list[Stimulus]:
        """Complete every step that waits for the worker's next process."""
        rows, request, done, op, _ = self.memory.words(worker)
        return self._lose(rows[(request != done) & (op != OP_RESET)], loss)

    def keep(self, worker: int) -> list[Stimulus]:
        """Complete the worker's part of a reset that leaves all its rows out."""
        words = self.memory.words(worker)
        return self._keep(words.rows[words.request != words.done])

    def release(self, worker: int) -> None:
        """The worker's rows are its own again."""
        self.losses.pop(worker, None)

    def _lose(self, rows: np.ndarray, loss: WorkerLoss) -> list[Stimulus]:
        arena = self.memory.arena
        reports: list[Stimulus] = []
        for row in rows.tolist():
            if loss.raises:
                reports += self._leave(row)
                reports.append(StandInFailed(replace(loss.failure, env_index=row)))
                arena.needs_reset[row] = FRESH
                arena.status[row] = STATUS_RAISED
            else:
                length, left = self._put_info(row, loss.info)
                reports += left
                truncate(arena, row, length)
        self._done(rows)
        return reports

    def _keep(self, rows: np.ndarray) -> list[Stimulus]:
        reports = [report for row in rows.tolist() for report in self._leave(row)]
        self._done(rows)
        return reports

    def _done(self, rows: np.ndarray) -> None:
        """These rows' results are stored."""
        arena = self.memory.arena
        arena.done[rows] = arena.request[rows]
        self.unrung = self.unrung or bool(rows.size)
        if self.loose is not None:
            self.loose.keep(arena, rows.tolist())

    def _leave(self, row: int) -> list[Stimulus]:
        length, reports = self._put_info(row, b"")
        stay(self.memory.arena, row, length)
        return reports

    def _put_info(self, row: int, info: bytes) -> tuple[int, list[Stimulus]]:
        """Store an info, with the parts of no fixed size of the observation that the row repeats.

        Returns:
            Its length, and what is to be reported where it is too large for the arena.
        """
        arena = self.memory.arena
        if self.loose is not None:
            info = with_objects(self.loose.of(arena, row), info)
        if put_info(arena, row, info):
            return len(info), []
        if self.loose is not None:
            self.loose.note_large(row, int(arena.request[row]), info)
        return len(info), [StandInInfo(row, info)]

    # --- what the next process is told --------------------------------------------------------------------------------

    def objects(self, worker: int) -> list[bytes]:
        """The parts of no fixed size of what the worker's rows showed last, one for each row, if there are such."""
        if self.loose is None:
            return []
        return [self.loose.of(self.memory.arena, row) for row in self.memory.rows(worker).tolist()]

    def keep_loose(self) -> None:
        """Keep the parts of no fixed size of all rows that are done: nobody may have seen them."""
        if self.loose is not None:
            self.loose.keep(self.memory.arena, range(self.memory.arena.layout.rows))

    def note(self, message: control.RowInfo) -> None:
        """Keep what a worker has said of a row because it is too large for the arena."""
        if self.loose is not None:
            self.loose.note_large(message.row, message.number, message.info)
