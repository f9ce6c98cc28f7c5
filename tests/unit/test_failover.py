"""Which row of a worker that has ended gets what: one test for each row of the table in ``memory.lost_rows``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from envhub_server.memory.lost_rows import Plan, plan_rows, posted_rows
from envhub_server.memory.session_memory import Words

from envhub.arena.memory import (
    ENDED,
    FRESH,
    ONGOING,
    OP_CALL,
    OP_OUT_OF_BAND,
    OP_PART,
    OP_RESET,
    OP_SET_ATTR,
    OP_STEP,
    REPORT_PENDING,
)

DONE = (5, 5)
UNDER_WAY = (6, 5)


def words(*rows: tuple[tuple[int, int], int, int]) -> Words:
    """The words of rows 1, 3, 5 and so on, as of the second of two workers: request and done, op, needs_reset."""
    columns = zip(*((*numbers, op, needs_reset, 0) for numbers, op, needs_reset in rows), strict=True)
    return Words(np.arange(1, 2 * len(rows), 2), *map(np.array, columns))


def found(planned: Plan) -> dict[str, Any]:
    """The plan without what is empty, as most of it is."""
    return {name: column.tolist() for name, column in planned._asdict().items() if column.size}


@pytest.mark.parametrize("needs_reset", [ENDED, FRESH])
def test_row_that_is_done_and_begins_an_episode_is_reset_first(needs_reset: int) -> None:
    planned = plan_rows(words((DONE, OP_STEP, needs_reset)), None, raises=False)
    assert found(planned) == {"needs_reset": [FRESH]}


@pytest.mark.parametrize("op", [OP_STEP, OP_OUT_OF_BAND, OP_RESET])
def test_row_that_is_done_reports_no_loss_where_one_error_of_another_row_stands_for_all(op: int) -> None:
    planned = plan_rows(words((DONE, op, ONGOING), (UNDER_WAY, op, ONGOING)), None, raises=True)
    assert planned.lost.tolist() == [3] and planned.needs_reset.tolist() == [FRESH, FRESH]


@pytest.mark.parametrize("needs_reset", [ONGOING, ENDED, FRESH, REPORT_PENDING])
def test_row_that_is_done_reports_the_loss_by_an_error_of_its_own_besides_parts_of_the_batch(needs_reset: int) -> None:
    planned = plan_rows(words((DONE, OP_STEP, needs_reset), (UNDER_WAY, OP_PART, ONGOING)), None, raises=True)
    assert planned.lost.tolist() == [3] and planned.needs_reset.tolist() == [REPORT_PENDING, FRESH]


@pytest.mark.parametrize(
    ("needs_reset", "raises"),
    [(ONGOING, False), (REPORT_PENDING, False), *((word, True) for word in (ONGOING, ENDED, FRESH, REPORT_PENDING))],
)
def test_row_that_is_done_reports_the_loss_at_its_next_step(needs_reset: int, raises: bool) -> None:
    planned = plan_rows(words((DONE, OP_STEP, needs_reset)), None, raises)
    assert found(planned) == {"needs_reset": [REPORT_PENDING]}


@pytest.mark.parametrize("op", [OP_STEP, OP_OUT_OF_BAND, OP_PART])
def test_step_under_way_is_completed_as_lost(op: int) -> None:
    planned = plan_rows(words((UNDER_WAY, op, ONGOING), (DONE, op, ONGOING)), None, raises=False)
    assert found(planned) == {"lost": [1], "needs_reset": [FRESH, REPORT_PENDING]}


def test_reset_of_a_row_that_the_request_names_is_left_to_the_next_worker() -> None:
    planned = plan_rows(words((UNDER_WAY, OP_RESET, ONGOING), (DONE, OP_RESET, ONGOING)), [1], raises=False)
    assert found(planned) == {"waiting": [1], "again": [3], "needs_reset": [FRESH, REPORT_PENDING]}


def test_reset_that_is_done_is_under_way_again_with_those_of_the_same_request() -> None:
    planned = plan_rows(words((UNDER_WAY, OP_RESET, ONGOING), (DONE, OP_RESET, ONGOING)), [1, 3], raises=False)
    assert found(planned) == {"waiting": [1], "again": [3], "needs_reset": [FRESH, FRESH]}
    planned = plan_rows(words((DONE, OP_RESET, ONGOING), (DONE, OP_RESET, ONGOING)), [1, 3], raises=False)
    assert planned.again.tolist() == planned.waiting.tolist() == []


def test_row_that_the_reset_leaves_out_is_kept() -> None:
    planned = plan_rows(words((DONE, OP_RESET, ENDED), (UNDER_WAY, OP_RESET, ENDED)), [1], raises=False)
    assert found(planned) == {"kept": [3], "needs_reset": [FRESH, FRESH]}


def test_row_that_the_reset_leaves_out_waits_with_those_that_it_names() -> None:
    planned = plan_rows(words((UNDER_WAY, OP_RESET, ONGOING), (UNDER_WAY, OP_RESET, ONGOING)), [1], raises=False)
    assert found(planned) == {"waiting": [1], "needs_reset": [FRESH, REPORT_PENDING]}


@pytest.mark.parametrize(("resetting", "raises"), [(None, False), (None, True), ([1], True), ([], True)])
def test_reset_that_cannot_be_repeated_is_completed_as_lost(resetting: list[int] | None, raises: bool) -> None:
    planned = plan_rows(words((UNDER_WAY, OP_RESET, ONGOING))._replace(begun=np.array([6])), resetting, raises)
    assert found(planned) == {"lost": [1], "needs_reset": [FRESH]}


def test_reset_that_its_worker_had_not_begun_is_left_to_the_next_even_if_the_loss_raises() -> None:
    planned = plan_rows(words((UNDER_WAY, OP_RESET, ONGOING), (UNDER_WAY, OP_RESET, ONGOING)), [1, 3], raises=True)
    assert found(planned) == {"waiting": [1, 3], "needs_reset": [FRESH, FRESH]}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("begun", "failed"), [((6, 6, 0), {"failed": [3, 5]}), ((5, 5, 5), {}), ((0, 0, 0), {})])
def test_call_fails_if_its_worker_had_begun_it_and_is_left_to_the_next_worker_otherwise(
    begun: tuple[int, ...], failed: dict[str, Any], raises: bool
) -> None:
    rows = words((DONE, OP_CALL, ONGOING), (UNDER_WAY, OP_CALL, ONGOING), (UNDER_WAY, OP_SET_ATTR, ONGOING))
    planned = plan_rows(rows._replace(begun=np.array(begun)), None, raises)
    assert found(planned) == {**failed, "needs_reset": [REPORT_PENDING] * 3}


def test_steps_that_are_posted_later_report_the_loss_once_and_then_wait_for_the_next_worker() -> None:
    lost, waiting = posted_rows(
        words(
            (UNDER_WAY, OP_STEP, REPORT_PENDING),
            (UNDER_WAY, OP_STEP, FRESH),
            (DONE, OP_STEP, REPORT_PENDING),
            (UNDER_WAY, OP_RESET, REPORT_PENDING),
            (UNDER_WAY, OP_PART, REPORT_PENDING),
            (UNDER_WAY, OP_STEP, ONGOING),
        ),
        is_batch=False,
    )
    assert (lost.tolist(), waiting.tolist()) == ([1, 9], [3, 11])


@pytest.mark.parametrize(
    ("second", "lost"),
    [
        ((UNDER_WAY, OP_STEP, FRESH), [1, 3]),  # its episode had ended
        ((UNDER_WAY, OP_PART, REPORT_PENDING), [1, 3]),
        ((DONE, OP_STEP, FRESH), []),
    ],
)
def test_rows_of_a_vector_env_report_the_loss_together(second: Any, lost: list[int]) -> None:
    found, waiting = posted_rows(words((UNDER_WAY, OP_STEP, REPORT_PENDING), second), is_batch=True)
    assert found.tolist() == lost and waiting.size == (0 if lost else 1)


def test_rows_of_a_vector_env_wait_together() -> None:
    lost, waiting = posted_rows(words((UNDER_WAY, OP_STEP, FRESH), (UNDER_WAY, OP_STEP, FRESH)), is_batch=True)
    assert (lost.tolist(), waiting.tolist()) == ([], [1, 3])
