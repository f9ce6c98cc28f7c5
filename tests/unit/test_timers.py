from __future__ import annotations

import math

from envhub_server.loop import Timers
from hypothesis import given
from hypothesis import strategies as st


def test_key_has_one_time_and_the_last_one_set_counts() -> None:
    timers = Timers()
    timers.set("a", 5.0)
    timers.set("a", 9.0)
    timers.set("b", 7.0)
    assert timers.next_s == 7.0
    assert timers.due(8.0) == ["b"] and timers.due(8.0) == []
    timers.set("a", math.inf)
    assert timers.next_s == math.inf and timers.due(1e9) == []


def test_key_that_is_set_back_to_an_earlier_time_is_due_once() -> None:
    timers = Timers()
    for at_s in (5.0, 9.0, 5.0):
        timers.set("a", at_s)
    assert timers.due(5.0) == ["a"] and timers.next_s == math.inf


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9) | st.just(math.inf))), st.integers(0, 10))
def test_due_are_those_whose_time_has_come_in_their_order(changes: list[tuple[int, float]], now_s: int) -> None:
    timers, expected = Timers(), {}
    for key, at_s in changes:
        timers.set(key, at_s)
        expected[key] = at_s
    assert timers.next_s == min(expected.values(), default=math.inf)
    due = timers.due(now_s)
    assert sorted(due) == sorted(key for key, at_s in expected.items() if at_s <= now_s)
    assert [expected[key] for key in due] == sorted(expected[key] for key in due)
    assert timers.next_s == min((at_s for at_s in expected.values() if at_s > now_s), default=math.inf)
