from __future__ import annotations

import random

import pytest
from envhub_server.session.launcher import ALL_MAX, DELAY_S, JITTER, STABLE_S, Restarts
from hypothesis import given
from hypothesis import strategies as st
from sessions import restarts

from envhub.env_failure import reseeded


def serve_and_end(found: Restarts, now_s: float, served_s: float, worker: int = 0) -> float | None:
    found.serves(worker, now_s - served_s)
    return found.ended(worker, now_s)


def test_one_that_ends_at_once_waits_twice_as_long_each_time_and_is_then_given_up() -> None:
    found = restarts()
    delays = [serve_and_end(found, 10.0 + number, served_s=0.1) for number in range(6)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, None]
    assert found.count(0) == 6 and found.count_text(0) == "it failed 6 times"


def test_delay_has_a_limit() -> None:
    found = restarts(1000)
    assert [serve_and_end(found, 100.0 * number, 0.1) for number in range(1, 1100)][-1] == 10.0


def test_one_that_served_for_a_while_is_started_again_at_once() -> None:
    found = restarts(100)
    assert [serve_and_end(found, 10.0 * number, served_s=5) for number in range(1, 20)] == [0.1] * 19


def test_ends_count_for_as_long_as_the_window() -> None:
    found = restarts()
    assert all(serve_and_end(found, 12.5 * number, served_s=5) is not None for number in range(1, 100))
    crowded = restarts()
    found = [serve_and_end(crowded, 10.0 * number, served_s=5) for number in range(1, 7)]  # type: ignore[assignment]
    assert found == [0.1] * 5 + [None]  # type: ignore[comparison-overlap]


def test_workers_have_budgets_of_their_own_and_one_of_all() -> None:
    found = restarts()
    delays = [serve_and_end(found, 10.0, served_s=5, worker=worker) for worker in range(11)]
    assert delays == [0.1] * 10 + [None]
    assert found.count_text(10) == "it failed 1 times, and all workers of this session 11 times within 60 s,"


def test_one_budget_of_all_workers_has_a_restart_for_each_env() -> None:
    found = Restarts(5, 12, random.Random(0).uniform)
    delays = [serve_and_end(found, 10.0, served_s=5, worker=worker) for worker in range(13)]
    assert None not in delays[:12] and delays[12] is None


def test_one_that_cannot_build_its_envs_gets_three_tries() -> None:
    found = restarts(1000)
    assert [found.ended(0, float(number)) for number in range(3)] == [0.1, 0.2, None]


def test_one_that_cannot_be_started_is_tried_ever_more_rarely_without_end() -> None:
    found = restarts()
    found.serves(0, 0.0)
    assert found.ended(0, 10.0) == 0.1
    delays = [found.ended(0, 10.0 + number, started=False) for number in range(20)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4] + [10.0] * 14
    assert found.ended(0, 31.0) is not None  # it was started, and has failed once


def test_tries_are_counted_from_zero_once_the_worker_served() -> None:
    found = restarts(1000)
    for number in range(10):
        assert found.ended(0, number) is not None
        assert found.ended(0, number) is not None
        found.serves(0, number)


def test_envs_rebuilt_in_their_worker_count_as_restarts() -> None:
    found = restarts()
    found.serves(0, 0.0)
    assert [found.faulted(0, 1.0) for _ in range(6)] == [True] * 5 + [False]


@given(st.integers(0, 2**63 - 1), st.integers(1, 1000))
def test_seed_of_another_incarnation_is_another_and_always_the_same(seed: int, incarnation: int) -> None:
    assert reseeded(seed, incarnation) == reseeded(seed, incarnation)
    assert reseeded(seed, incarnation) not in (seed, reseeded(seed, incarnation + 1))
    assert 0 <= reseeded(seed, incarnation) < 2**31  # type: ignore[operator]
    assert reseeded(None, incarnation) is None and reseeded(seed, 0) == seed


def test_delay_is_longer_or_shorter_by_what_is_drawn() -> None:
    drawn = {(-JITTER, JITTER): JITTER / 2}
    restarts_ = Restarts(5, 1, lambda low, high: drawn[low, high])
    assert serve_and_end(restarts_, 10.0, 0.1) == pytest.approx(DELAY_S * (1 + JITTER / 2))


def test_worker_that_served_for_just_a_while_begins_a_new_row() -> None:
    found = restarts(100)
    assert [serve_and_end(found, 10.0 * number, STABLE_S) for number in (1, 2, 3)] == [DELAY_S] * 3


def test_all_workers_are_told_of_where_they_are_what_was_too_often() -> None:
    found = Restarts(ALL_MAX - 1, 1, random.Random(1).uniform)
    for worker in range(ALL_MAX + 1):
        assert ("all workers" in found.count_text(worker)) is False
        given_up = serve_and_end(found, 100.0, STABLE_S, worker) is None
        assert given_up == (worker == ALL_MAX)
    assert found.count_text(0) == f"it failed 1 times, and all workers of this session {ALL_MAX + 1} times within 60 s,"
    for number in range(ALL_MAX - 1):
        found.faulted(0, 100.0)
        assert ("all workers" in found.count_text(0)) == (number < ALL_MAX - 2), (
            "then it is this one that failed too often"
        )
