"""Results for the rows of a worker that has ended: pure functions over the arena's words.

====================  ====================================  ==================  ======================================
the row               and                                   its step            ``needs_reset`` afterwards
====================  ====================================  ==================  ======================================
is done               the loss raises in another row's      --                  FRESH: one error reports all rows
                      step of the whole batch
is done               its episode had ended, or it is new,  --                  FRESH: reset before its next step
                      and the loss is a truncation
is done               the pending reset names it, and also  pending again, for  FRESH: the next worker resets it
                      a row that is not done                the next worker
is done               otherwise                             --                  REPORT_PENDING: the next step reports
waits for a step                                            completed as lost   FRESH
waits for a reset     the reset names it                    left to the next    FRESH: the next worker resets it
                                                            worker
waits for a reset     the reset does not name it            kept, unless        as a row that is done
                                                            others are reset
waits for a reset     the loss raises, or the hub has no    completed as lost   FRESH
                      pending reset
====================  ====================================  ==================  ======================================

A step that is completed as lost is a truncation, or an exception if the policy is to raise. A row that is kept repeats
its last observation.

If the policy is to raise, the first step of each row that was not done when its worker ended raises, once. The step may
have been posted before or after the end, and the hub need not have known of the end. A step of the whole batch raises
once for all of its rows. In partial batches, each error replaces one row's result.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from envhub.arena.memory import ENDED, FRESH, OP_PART, OP_RESET, REPORT_PENDING


class Words(NamedTuple):
    """The arena's words for some rows: the rows' indices, and per word an array in the order of ``rows``."""

    rows: np.ndarray
    request: np.ndarray
    done: np.ndarray
    op: np.ndarray
    needs_reset: np.ndarray


class Plan(NamedTuple):
    """The fates of the rows of a worker that has ended."""

    lost: np.ndarray  # rows whose step is completed as lost
    kept: np.ndarray  # rows whose reset is completed without a change
    waiting: np.ndarray  # rows whose reset the next worker carries out
    again: np.ndarray  # rows that are done, and whose reset the next worker carries out once more
    # The new word of every row, in the order of ``Words.rows``; a lost row's is stored with its loss.
    needs_reset: np.ndarray


def plan(words: Words, resetting: Collection[int] | None, raises: bool) -> Plan:
    """Decide what becomes of each row when the hub learns that its worker has ended.

    Args:
        words: the words of the worker's rows.
        resetting: the rows that the pending reset names; None if no reset is pending.
        raises: True if the loss is reported as an exception.
    """
    rows, pending = words.rows, words.request != words.done
    asked = (words.op == OP_RESET) & (resetting is not None and not raises)
    is_named = np.isin(rows, list(resetting or ()))
    resets, named = pending & asked, pending & asked & is_named
    kept, again = resets & ~named, ~pending & asked & is_named & named.any()
    lost = pending & ~resets
    reported = raises and bool((words.op[lost] != OP_PART).any())  # one error reports all rows
    new = (words.needs_reset == ENDED) | (words.needs_reset == FRESH)
    needs_reset = np.where(reported | (new & (not raises)), FRESH, REPORT_PENDING)
    needs_reset[named | again | lost] = FRESH
    return Plan(rows[lost], rows[kept & (not named.any())], rows[named], rows[again], needs_reset)


def posted(words: Words, is_batch: bool) -> tuple[np.ndarray, np.ndarray]:
    """The rows of steps posted to an ended worker: rows whose step is lost, and rows that wait for the next worker.

    A step reports the loss if no earlier step has. Otherwise it is the first step of the rebuilt env, and waits for it.
    Resets wait without a limit. With ``is_batch`` the rows are those of a vector env, which takes one step for all of
    them: they are lost or wait together.
    """
    steps = (words.request != words.done) & (words.op != OP_RESET)
    reporting = steps & (words.needs_reset == REPORT_PENDING)
    if is_batch and reporting.any():
        reporting = steps & steps.all()  # a driver may not have posted the other rows yet
    return words.rows[reporting], words.rows[steps & ~reporting]
