from __future__ import annotations

import math
from collections.abc import Callable

from envhub_server.loop import Clock, Schedule
from hypothesis import given
from hypothesis import strategies as st


class Calls:
    """A schedule of functions, each with a name, and the names of those that were called."""

    def __init__(self) -> None:
        self.schedule, self.called, self.acts = Schedule(Clock()), list[object](), dict[object, Callable[[], None]]()

    def set(self, name: object, at_s: float) -> None:
        self.schedule.set(self.acts.setdefault(name, lambda: self.called.append(name)), at_s)

    def due(self, now_s: float) -> list[object]:
        self.called.clear()
        self.schedule.call_due(now_s)
        return [*self.called]


def test_function_has_one_time_and_the_last_one_set_counts() -> None:
    calls = Calls()
    for name, at_s in (("a", 5.0), ("a", 9.0), ("b", 7.0)):
        calls.set(name, at_s)
    assert calls.schedule.next_s == 7.0
    assert calls.due(8.0) == ["b"] and calls.due(8.0) == []
    calls.set("a", math.inf)
    assert calls.schedule.next_s == math.inf and calls.due(1e9) == []


def test_function_that_is_set_back_to_an_earlier_time_is_called_once() -> None:
    calls = Calls()
    for at_s in (5.0, 9.0, 5.0):
        calls.set("a", at_s)
    assert calls.due(5.0) == ["a"] and calls.schedule.next_s == math.inf


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9) | st.just(math.inf))), st.integers(0, 10))
def test_those_are_called_whose_time_has_come_in_their_order(changes: list[tuple[int, float]], now_s: int) -> None:
    calls, expected = Calls(), dict[object, float]()
    for name, at_s in changes:
        calls.set(name, at_s)
        expected[name] = at_s
    assert calls.schedule.next_s == min(expected.values(), default=math.inf)
    due = calls.due(now_s)
    assert {*due} == {name for name, at_s in expected.items() if at_s <= now_s} and len(due) == len({*due})
    assert [expected[name] for name in due] == sorted(expected[name] for name in due)
    assert calls.schedule.next_s == min((at_s for at_s in expected.values() if at_s > now_s), default=math.inf)
