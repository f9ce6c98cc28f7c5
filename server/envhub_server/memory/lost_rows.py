"""Results in place of envs whose worker has ended, so that no driver waits for them.

A worker owns the words and results of its rows from when it serves until it is reaped; then the hub owns them, until
the next process serves. ``plan_rows`` says which row gets which result:

====================  ====================================  ==================  ======================================
the row               and                                   its step            ``needs_reset`` afterwards
====================  ====================================  ==================  ======================================
is done               the loss raises in another row's      --                  FRESH: one error reports all rows
                      step of the whole batch
is done               its episode had ended, or it is new,  --                  FRESH: reset before its next step
                      and the loss is a truncation
is done               the pending reset names a row that    pending again, for  FRESH if the reset names it, else as
                      is not done                           the next worker     a row that is done otherwise
is done               otherwise                             --                  REPORT_PENDING: the next step reports
waits for a step                                            completed as lost   FRESH
waits for a reset     the reset names it                    left to the next    FRESH: the next worker resets it
                                                            worker
waits for a reset     the reset does not name it            kept, unless        as a row that is done
                                                            others are reset
waits for a reset     its worker had begun the reset, and   completed as lost   FRESH
                      the loss raises
waits for a call      its worker had begun the call         failed              as a row that is done
waits for a call      its worker had not begun it           left to the next    as a row that is done
                                                            worker
====================  ====================================  ==================  ======================================

A step that is completed as lost is a truncation, or an exception if the policy is to raise. A row that is kept repeats
its last observation. A call that has begun is never repeated; it fails, whatever the policy.

If the policy is to raise, the first step of each row that was not done when its worker ended raises, once. The step may
have been posted before or after the end, and the hub need not have known of the end. A step of the whole batch raises
once for all of its rows. In partial batches, each error replaces one row's result.

Leaves of an observation that have no fixed size (objects) have one place per row in the arena, in front of the info.
The arrays have two slots, so the last complete ones survive an env that fails in the middle of the next step; the
objects do not. So the hub copies them whenever rows are done and no driver may have read them: the step failed, another
client attaches, or a call is about to replace them by its result. Each copy has the row's number of steps, so that a
copy of an older observation is never used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from envhub.arena.memory import (
    CALL_INCREMENT,
    CALLS,
    ENDED,
    FRESH,
    OP_PART,
    OP_RESET,
    REPORT_PENDING,
    STATUS_RAISED,
    STEPS,
    Arena,
    mark_no_step,
    truncate,
)
from envhub.values import codec
from envhub_server.ipc import control
from envhub_server.memory.session_memory import SessionMemory, Words
from envhub_server.session.machine import SessionMachine
from envhub_server.session.slots import WorkerLoss
from envhub_server.session.state import Event


class Plan(NamedTuple):
    """The fates of the rows of a worker that has ended."""

    lost: np.ndarray  # rows whose step is completed as lost
    kept: np.ndarray  # rows whose reset is completed without a change
    waiting: np.ndarray  # rows whose reset the next worker carries out
    again: np.ndarray  # rows that are done, and whose reset the next worker carries out once more
    failed: np.ndarray  # rows whose call fails
    # The new word of every row, in the order of ``Words.rows``; a lost row's is stored with its loss.
    needs_reset: np.ndarray


def plan_rows(words: Words, resetting: Collection[int] | None, raises: bool) -> Plan:
    """Decide what becomes of each row when the hub learns that its worker has ended."""
    # ``resetting`` are the rows that the pending reset names, None if none is pending; a loss that ``raises`` is
    # reported as an exception.
    rows, pending = words.rows, words.request != words.done
    has_begun = bool(((words.op == OP_RESET) & (words.begun == words.request)).any())
    asked = (words.op == OP_RESET) & (resetting is not None and not (raises and has_begun))
    is_named = np.isin(rows, list(resetting or ()))
    resets, named = pending & asked, pending & asked & is_named
    kept, again = resets & ~named, ~pending & asked & named.any()
    calls = pending & np.isin(words.op, CALLS)
    failed = calls & (calls & (words.begun == words.request)).any()
    lost = pending & ~resets & ~calls
    reported = raises and bool((words.op[lost] != OP_PART).any())  # one error reports all rows
    new = (words.needs_reset == ENDED) | (words.needs_reset == FRESH)
    needs_reset = np.where(reported | (new & (not raises)), FRESH, REPORT_PENDING)
    needs_reset[named | (again & is_named) | lost] = FRESH
    return Plan(rows[lost], rows[kept & (not named.any())], rows[named], rows[again], rows[failed], needs_reset)


def posted_rows(words: Words, is_batch: bool) -> tuple[np.ndarray, np.ndarray]:
    """The rows of steps posted to an ended worker: rows whose step is lost, and rows that wait for the next worker."""
    # A step reports the loss if no earlier step has. Otherwise it is the first step of the rebuilt env, and waits for
    # it. Resets and calls wait without a limit. With ``is_batch`` the rows are those of a vector env, which takes one
    # step for all of them: they are lost or wait together.
    steps = (words.request != words.done) & np.isin(words.op, STEPS)
    reporting = steps & (words.needs_reset == REPORT_PENDING)
    if is_batch and reporting.any():
        reporting = steps & steps.all()  # a driver may not have posted the other rows yet
    return words.rows[reporting], words.rows[steps & ~reporting]


class ObjectCopies:
    """Copies of the objects of each row's last observation, each with that observation's number."""

    def __init__(self) -> None:
        self._large: dict[int, tuple[int, bytes]] = {}  # by row: sent by its worker, as too large for the arena
        self._kept: dict[int, tuple[int, bytes]] = {}

    def keep_large(self, row: int, number: int, blob: bytes) -> None:
        self._large[row] = (number, blob)

    def keep(self, arena: Arena, rows: Iterable[int], has_left: bool = False) -> None:
        """Copy the objects of those of these rows that are done."""
        # With ``has_left``, those of all of these rows: their worker has left and stored nothing for pending ones.
        for row in rows:
            number = int(arena.done[row]) % CALL_INCREMENT
            if arena.op[row] in CALLS or (arena.done[row] != arena.request[row] and not has_left):
                continue
            if self._kept.get(row, (-1, b""))[0] == number:
                continue  # it is of the same observation
            blob = arena.info(row)
            self._kept[row] = self._large.get(row, (-1, b"")) if blob is None else (number, bytes(blob))

    def last(self, arena: Arena, row: int) -> bytes:
        number, blob = self._kept.get(row, (-1, b""))
        if number != arena.done[row] % CALL_INCREMENT:
            return b""
        try:
            return bytes(codec.decode_pair(blob)[0])
        except codec.DecodeError:  # a client may write to the arena
            return b""


class LostWorkerRows:
    """Completes rows in place of the workers of one session that have ended."""

    # The events that its methods return are for the session's state machine.

    def __init__(self, memory: SessionMemory, copies: ObjectCopies | None, is_batch: bool = False) -> None:
        self._is_batch = is_batch
        self.memory = memory  # the session's, with the rows
        self.copies = copies  # of the objects in observations; None where the observation space has no objects
        self.losses: dict[int, WorkerLoss] = {}  # by slot whose process has ended, the loss that its rows report
        # Whether rows are done that the driver was not woken for; the session's runtime wakes it and clears this.
        self.unrung = False

    def take(self, slot: int, loss: WorkerLoss, has_left: bool = False) -> list[Event]:
        """Complete the step of a slot whose process has ended; its rows are the hub's from now on."""
        # One that ``has_left`` has stored what it has done, and whether the next step of a row is a truncation.
        first, self.losses[slot] = slot not in self.losses, loss
        if not first:
            return []
        arena, words = self.memory.arena, self.memory.words(slot)
        if has_left:
            self._copy_objects(words.rows.tolist(), has_left=True)
            return self.posted(slot)
        resets = bool(((words.request != words.done) & (words.op == OP_RESET)).any())
        plan = plan_rows(words, self.memory.reset_rows() if resets else None, loss.raises)
        self._copy_objects(words.rows[words.request == words.done].tolist())  # those of others may be incomplete
        arena.needs_reset[words.rows] = plan.needs_reset
        # The results of the reset are unread: the rows' last observations are again those before it.
        arena.done[plan.again] = arena.request[plan.again] - 1
        self.unrung = True  # it may have ended after its last row was done and before it rang
        return [*self._lose(plan.lost, loss), *self._keep(plan.kept), *self._fail_calls(plan.failed, loss)]

    def posted(self, slot: int) -> list[Event]:
        """Complete what was posted since to the rows of a slot whose process has ended, as far as it need not wait."""
        # A step that reports the loss, and a reset that names none of these rows.
        loss = self.losses.get(slot)
        if loss is None:
            return []
        words = self.memory.words(slot)
        lost, waiting = posted_rows(words, self._is_batch)
        reports = self._lose(lost, loss)
        resets = words.rows[(words.request != words.done) & (words.op == OP_RESET)]
        if resets.size and not (self.memory.reset_rows() or set()).intersection(words.rows.tolist()):
            reports += self._keep(resets)
        return [*reports, (SessionMachine.on_rows_waiting, (slot,))] if waiting.size else reports

    def finish(self, slot: int, loss: WorkerLoss) -> list[Event]:
        words = self.memory.words(slot)
        return self._lose(words.rows[(words.request != words.done) & np.isin(words.op, STEPS)], loss)

    def _fail_calls(self, rows: np.ndarray, loss: WorkerLoss) -> list[Event]:
        failure = replace(loss.failure, message=f"{loss.failure.message} during a call")
        self.memory.arena.status[rows] = STATUS_RAISED
        self._done(rows)
        return [(SessionMachine.on_lost_row_failed, (replace(failure, env_index=row),)) for row in rows.tolist()]

    def _lose(self, rows: np.ndarray, loss: WorkerLoss) -> list[Event]:
        arena = self.memory.arena
        reports: list[Event] = []
        for row in rows.tolist():
            if loss.raises:
                reports += self._leave(row)
                reports.append((SessionMachine.on_lost_row_failed, (replace(loss.failure, env_index=row),)))
                arena.needs_reset[row] = FRESH
                arena.status[row] = STATUS_RAISED
            else:
                length, template, left = self._put_info(row, loss.info)
                reports += left
                truncate(arena, row, length, template)
        self._done(rows)
        return reports

    def _keep(self, rows: np.ndarray) -> list[Event]:
        reports = [report for row in rows.tolist() for report in self._leave(row)]
        self._done(rows)
        return reports

    def _done(self, rows: np.ndarray) -> None:
        arena = self.memory.arena
        arena.done[rows] = arena.request[rows]
        self.unrung = self.unrung or bool(rows.size)
        self._copy_objects(rows.tolist())

    def _copy_objects(self, rows: Iterable[int], has_left: bool = False) -> None:
        if self.copies is not None:
            self.copies.keep(self.memory.arena, rows, has_left)

    def _leave(self, row: int) -> list[Event]:
        length, template, reports = self._put_info(row, b"")
        mark_no_step(self.memory.arena, row, length, template)
        return reports

    def _put_info(self, row: int, info: bytes) -> tuple[int, int, list[Event]]:
        """Store an info, with the objects of the repeated observation; returns its length, template, and an event."""
        arena = self.memory.arena
        if self.copies is not None:
            info = codec.encode_pair(self.copies.last(arena, row), info)
        if (template := arena.put_info(row, info)) is not None:
            return len(info), template, []
        if self.copies is not None:
            self.copies.keep_large(row, int(arena.request[row]) % CALL_INCREMENT, info)
        return len(info), 0, [(SessionMachine.on_lost_row_info, (row, info))]

    # --- objects in observations --------------------------------------------------------------------------------------

    def objects(self, slot: int) -> list[bytes]:
        """The objects of the last observation of each of the rows of a worker; empty if the space has no objects."""
        if self.copies is None:
            return []
        arena, rows = self.memory.arena, self.memory.rows(slot).tolist()
        self.copies.keep(arena, rows)
        return [self.copies.last(arena, row) for row in rows]

    def keep_objects(self) -> None:
        self._copy_objects(range(self.memory.arena.layout.rows))

    def on_row_info(self, message: control.RowInfo) -> None:
        """Keep an info that a worker has sent, or a result of a call, which has no objects."""
        if self.copies is not None and self.memory.arena.op[message.row] not in CALLS:
            self.copies.keep_large(message.row, message.number % CALL_INCREMENT, message.info)
