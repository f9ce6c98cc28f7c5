"""The page of a session's ends, compared with its state machine."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import logged_events
import pytest
from envhub_server.ipc.control import CloseEnvs, RowFailed
from envhub_server.session.launcher import ALL_MAX, DELAY_S, JITTER, STABLE_S, Restarts
from envhub_server.session.state import OVER, TRANSITIONS
from hypothesis import given
from hypothesis import strategies as st
from pages import section
from recorder import Answer, Effect, Fail, Kill, Tell, events
from sessions import Session, begun, every, ready, restarts

from envhub.env_failure import reseeded
from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import Close, Failure, Faults, Step

ROOT = Path(__file__).parents[2]
PAGE = section(ROOT / "envhub/docs/architecture.md", "How a session ends")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
ENDS = {end: (told, envs, seen, event) for end, told, envs, seen, event in ROWS[1:]}
CLOSED = [Tell(0, CloseEnvs()), Tell(1, CloseEnvs())]
KILLED = [Kill(0), Kill(1)]
LOST = Failure("session_lost", "session", "why")


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def late(session: Session) -> list[Effect]:
    session.request(Close())
    return session.elapsed(session.make.faults.close_s)


def at_work(session: Session) -> Session:
    session.request(Step(b"\x04"))
    return session


def failed_making() -> list[Effect]:
    session = begun()
    return session.worker_sent(0, RowFailed(Failure("factory_failed", "env", "no", env_index=0)))


def broken() -> list[Effect]:
    session = at_work(ready(faults=Faults(restarts_max=0)))
    ended = session.exited(0)
    assert every(Fail, session.request(Step(b"\x04"))) == every(Fail, ended)  # as every later request
    return [*ended, *session.request(Close())]


def drained(session: Session, now_s: float = 0.0) -> list[Effect]:
    draining = events.Draining(by_s=10.0, end_by_s=20.0, quiescent=True)
    return session.handle(draining, now_s)


# By end: what it begins with, the orders to the processes, and the code of the failure that a client sees.
SHOWN: dict[str, tuple[Callable[[], list[Effect]], list[Effect], str]] = {
    "the client closes it": (lambda: ready().request(Close()), CLOSED, ""),
    "the client terminates it": (lambda: ready().request(Close(terminate=True)), KILLED, ""),
    "its envs do not close within `close_timeout`": (lambda: late(ready()), KILLED, ""),
    "its lease runs out": (lambda: ready().handle(events.LeaseExpired()), CLOSED, ""),
    "its envs cannot be made": (failed_making, KILLED, "factory_failed"),
    "a worker fails too often": (broken, [Tell(1, CloseEnvs())], "restarts_exhausted"),
    "a bug of the hub, or a damaged arena": (
        lambda: at_work(ready()).handle(events.Abandoned(Failure("internal", "session", "a bug"))),
        KILLED,
        "internal",
    ),
    "the hub stops by SIGTERM, or at the deadline of a drain": (lambda: drained(ready()), CLOSED, ""),
    "the hub stops at once": (lambda: at_work(ready()).handle(events.Abandoned(SHUTTING_DOWN)), KILLED, "draining"),
    "an operator ends it, or removes the client's key": (
        lambda: at_work(ready()).handle(events.Abandoned(LOST)),
        KILLED,
        "session_lost",
    ),
}


def test_every_end_is_shown_and_every_event_is_known() -> None:
    assert ENDS.keys() == SHOWN.keys()
    for *_, event in ENDS.values():
        assert event == "none" or {*names(event)} <= logged_events.events().keys()


def test_page_has_every_event_that_may_end_a_session() -> None:
    ending = {name for name, following in TRANSITIONS.items() if {*OVER} & {*chain.from_iterable(following.values())}}
    # The session is over already when its close timeout ends.
    assert {f"on_{name}" for told, *_ in ENDS.values() for name in names(told)} == ending | {"on_elapsed"}


@pytest.mark.parametrize("end", SHOWN)
def test_end_treats_its_envs_and_its_client_as_the_page_says(end: str) -> None:
    begin, orders, code = SHOWN[end]
    instructions = begin()
    assert [each for each in instructions if isinstance(each, (Tell, Kill))] == orders
    assert [each.failure.code for each in every(Fail, instructions)] == ([code] if code else [])
    _, envs, seen, _ = ENDS[end]
    kept = "kept, until the client closes" in envs
    assert kept or envs.startswith("killed" if isinstance(orders[0], Kill) else "closed")
    assert not code or f"`{code}`" in seen or code == "factory_failed"


# --- restarts ---------------------------------------------------------------------------------------------------------


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


def test_envs_that_cannot_be_made_either_are_no_failure_of_the_close() -> None:
    session = begun()
    for worker in (0, 1):
        session.worker_sent(worker, RowFailed(Failure("factory_failed", "env", "no", env_index=worker)))
    session.request(Close(terminate=True))
    ends = [*session.exited(0), *session.exited(1)]
    assert [type(each) for each in ends if isinstance(each, (Answer, Fail))] == [Answer]
