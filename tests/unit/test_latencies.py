"""Percentiles of times in an arena's words, whatever the words say, and the list of slow requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from envhub_server.hub.biography import SLOW_ROWS_MAX, SlowRequests, Subject, percentiles
from envhub_server.ipc.control import Slow
from envhub_server.network.connections import OWN_USER, Holder
from hypothesis import given
from hypothesis import strategies as st
from sessions import ready

from envhub.arena.layout import STEPS_TIMED
from envhub.arena.memory import TIMED_ALWAYS_NS, TIMED_EVERY, StepTimes

words = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 10)
arrays = st.integers(1, 40).flatmap(lambda size: st.lists(st.lists(words, min_size=size, max_size=size), min_size=1))


@given(arrays)
def test_half_and_all_but_a_hundredth_of_the_known_times_are_at_most_the_percentiles(times_ns: list[list[int]]) -> None:
    for found, row in zip(percentiles(np.array(times_ns, np.int64)), times_ns, strict=True):
        known = [each / 1e6 for each in row if each > 0]
        if not known:
            assert found == {"p50": None, "p99": None}
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            if (value := found[name]) is not None:
                assert min(known) <= value + 1e-4 and math.isfinite(value)
                assert sum(each <= value + 1e-4 for each in known) >= share * len(known)
                assert sum(each < value - 1e-4 for each in known) < share * len(known)


@pytest.mark.parametrize(("took_ns", "timed"), [(1000, 1 + 999 // TIMED_EVERY), (TIMED_ALWAYS_NS, 1000)])
def test_long_steps_are_all_timed_and_short_ones_seldom(took_ns: int, timed: int) -> None:
    words = np.zeros(STEPS_TIMED, np.int64)
    times = StepTimes(words.data)
    for step in range(1000):
        if step >= times.next_step:
            times.keep(step, took_ns)
    assert times.kept == timed
    assert words.tolist() == [took_ns] * min(timed, STEPS_TIMED) + [0] * (STEPS_TIMED - timed)


def test_list_of_slow_requests_forgets_the_oldest_and_is_its_owners() -> None:
    slow, subject = SlowRequests(), Subject("0badcafe", "alice", ready(3, workers=2), None)
    for number in range(SLOW_ROWS_MAX + 2):
        # A worker can say what it wants: rows of others, and any time and verb.
        slow.on_slow(subject, subject.state.number(1), Slow("step" * 100, [0, 1, 1 << 19], number * 1_000_000))
    slow.on_slow(subject, 99, Slow("step", [1], 1))
    rows = slow.rows(OWN_USER, [subject])
    assert [row["ms"] for row in rows] == [float(number) for number in range(2, SLOW_ROWS_MAX + 2)]
    assert {(row["session"], row["worker"], *row["envs"]) for row in rows} == {("0badcafe", 1, 1)}
    assert all(len(row["verb"]) <= 64 for row in rows)
    assert slow.rows(Holder("bob"), []) == [] and len(slow.rows(Holder("alice"), [])) == SLOW_ROWS_MAX
