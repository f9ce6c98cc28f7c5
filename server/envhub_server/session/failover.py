"""Results for the rows of a worker that has ended: pure functions over the arena's words.

====================  ====================================  ==================  ======================================
the row               and                                   its step            ``needs_reset`` says afterwards
====================  ====================================  ==================  ======================================
is done               the loss raises in another's step     --                  FRESH: that one error tells of all
                      of the whole batch
is done               its episode had ended, or it is new,  --                  FRESH: reset before its next step
                      and the loss is a truncation
is done               the request that has reset it names   under way again,    FRESH: the next worker resets it
                      a row that waits for its reset        left for the next
is done               otherwise                             --                  REPORT_PENDING: the next step tells
waits for a step                                            completed, as lost  FRESH
waits for a reset     of a request that names it            left for the next   FRESH: the next worker resets it
waits for a reset     of a request that leaves it out       kept, unless        as of a row that is done
                                                            others are reset
waits for a reset     the loss raises, or the hub knows of  completed, as lost  FRESH
                      no request
====================  ====================================  ==================  ======================================

Completed as lost is a truncation, or an exception where the policy is to raise. A row that is kept shows its last
observation again.

Where the policy is to raise, the first step of each row that was not done when its worker ended raises, once. It makes
no difference whether that step was posted before the end or after it, and what the hub knew of the end by then. A step
of the whole batch raises once for all of its rows; in parts of a batch, each error is in place of one row's result.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from envhub.arena.memory import OP_PART, OP_RESET
from envhub.arena.stand_in import ENDED, FRESH, REPORT_PENDING


class Words(NamedTuple):
    """Words of the arena for some rows: the rows' indices, and a column of each word for exactly these."""

    rows: np.ndarray
    request: np.ndarray
    done: np.ndarray
    op: np.ndarray
    needs_reset: np.ndarray


class Plan(NamedTuple):
    """Fates of the rows of a worker that has ended.

    Attributes:
        lost: rows whose step is completed as lost.
        kept: rows whose reset is completed without a change.
        waiting: rows whose reset the next worker carries out.
        again: rows that are done, and whose reset the next worker carries out once more.
        needs_reset: the new word of every row, in the order of ``Words.rows``; that of the lost is set with the loss.
    """

    lost: np.ndarray
    kept: np.ndarray
    waiting: np.ndarray
    again: np.ndarray
    needs_reset: np.ndarray


def plan(words: Words, resetting: Collection[int] | None, raises: bool) -> Plan:
    """Fate of each row at the moment at which its worker is found to have ended.

    Args:
        words: of the worker's rows.
        resetting: of these the rows that the reset under way names; None where no reset is under way.
        raises: whether the loss is told as an exception.
    """
    rows, pending = words.rows, words.request != words.done
    asked = (words.op == OP_RESET) & (resetting is not None and not raises)
    is_named = np.isin(rows, list(resetting or ()))
    resets, named = pending & asked, pending & asked & is_named
    kept, again = resets & ~named, ~pending & asked & is_named & named.any()
    lost = pending & ~resets
    told = raises and bool((words.op[lost] != OP_PART).any())  # of all rows, by one error
    new = (words.needs_reset == ENDED) | (words.needs_reset == FRESH)
    needs_reset = np.where(told | (new & (not raises)), FRESH, REPORT_PENDING)
    needs_reset[named | again | lost] = FRESH
    return Plan(rows[lost], rows[kept & (not named.any())], rows[named], rows[again], needs_reset)


def posted(words: Words, is_batch: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of steps posted to a worker that has ended: those that are lost, and those that wait for the next.

    A step tells of the loss where nobody has been told of it. Otherwise it is the first of an env that is made again,
    for which it waits. Resets wait without a limit. With ``is_batch`` the rows are those of a vector env, which takes
    one step for all of them: they are lost or wait together.
    """
    steps = (words.request != words.done) & (words.op != OP_RESET)
    owed = steps & (words.needs_reset == REPORT_PENDING)
    if is_batch and owed.any():
        owed = steps & steps.all()  # a driver may not have posted the other rows yet
    return words.rows[owed], words.rows[steps & ~owed]
