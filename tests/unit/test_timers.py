from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from envhub_client.deadline import no_reply, seconds_text
from envhub_server.loop import Clock, Schedule
from envhub_server.session.slots import HangDetector, Late
from hypothesis import given
from hypothesis import strategies as st

from envhub.arena.spin import SKIPS_MAX, SPIN_US, SPIN_US_MAX, Spinner, spin_us
from envhub.protocol.messages import Faults


class Calls:
    """A schedule of functions, each with a name, and the names of those that were called."""

    def __init__(self) -> None:
        self.schedule, self.called, self.acts = Schedule(Clock()), list[object](), dict[object, Callable[[], None]]()

    def set(self, name: object, at_s: float) -> None:
        self.schedule.set(self.acts.setdefault(name, lambda: self.called.append(name)), at_s)

    def due(self, now_s: float) -> list[object]:
        self.called.clear()
        self.schedule.call_expired(now_s)
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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0442694, "0.044"), (0.682282, "0.68"), (0.3, "0.3"), (5, "5"), (119.9987, "120"), (2.5, "2.5")],
)
def test_seconds_are_shown_with_few_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "hubs"),
    [
        (1, "hub at 0"),
        (2, "hubs at 0 and 1"),
        (3, "hubs at 0, 1 and 2"),
        (10, "hubs at 0, 1, 2, 3, 4, 5, 6, 7, 8 and 9"),
        (12, "hubs at 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 others"),
    ],
)
def test_error_names_the_hubs_that_have_not_replied(count: int, hubs: str) -> None:
    text = no_reply([str(number) for number in range(count)], 0.5)
    assert text == f"no reply from the {hubs} within 0.5 s; it can be waited for again"


# --- spinning ---------------------------------------------------------------------------------------------------------


class LookedAtClock:
    """Every look at it takes a microsecond."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


class After:
    """Ready at the n-th question."""

    def __init__(self, questions: float) -> None:
        self.left = questions

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_what_is_ready_needs_no_clock() -> None:
    clock = LookedAtClock()
    assert Spinner(50, clock).spin(After(0)) and clock.now_ns == 0


def test_a_spin_is_bounded() -> None:
    clock = LookedAtClock()
    assert not Spinner(50, clock).spin(After(float("inf")))
    assert clock.now_ns <= 52_000


def test_without_a_limit_no_side_spins() -> None:
    clock = LookedAtClock()
    spinner = Spinner(0, clock)
    assert not spinner.spin(After(1)) and spinner.spin(After(0)) and clock.now_ns == 0


def test_vain_spins_become_rare_and_a_good_one_brings_them_back() -> None:
    clock = LookedAtClock()
    spinner = Spinner(10, clock)
    spun = []
    for _ in range(600):
        before = clock.now_ns
        spinner.spin(After(float("inf")))
        spun.append(clock.now_ns > before)
    starts = [number for number, did in enumerate(spun) if did]
    gaps = [after - before - 1 for before, after in itertools.pairwise(starts)]
    assert gaps[:8] == [1, 3, 7, 15, 31, 63, 127, 127] and max(gaps) == SKIPS_MAX
    while not spinner.spin(After(2)):
        pass
    assert spinner.spin(After(2))


@pytest.mark.parametrize(
    ("processes", "cpus", "quota", "wanted"),
    [(2, 4, False, SPIN_US), (4, 4, False, SPIN_US), (5, 4, False, 0), (2, 4, True, 0)],
)
def test_no_process_spins_where_cpus_are_short(
    processes: int, cpus: int, quota: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envhub.arena.spin.HAS_FENCE", True)
    monkeypatch.delenv("ENVHUB_SPIN_US", raising=False)
    assert spin_us(processes, cpus, quota) == wanted
    monkeypatch.setattr("envhub.arena.spin.HAS_FENCE", False)
    assert spin_us(processes, cpus, quota) == 0


def test_variable_overrides_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVHUB_SPIN_US", "7")
    assert spin_us(100, 1, True) == 7
    for wrong in ("-1", "x", "", str(SPIN_US_MAX + 1), "1" * 5000):
        monkeypatch.setenv("ENVHUB_SPIN_US", wrong)
        with pytest.raises(ValueError, match="ENVHUB_SPIN_US"):
            spin_us(1, 1, False)


# --- a loop that hangs ------------------------------------------------------------------------------------------------


FAULTS = Faults(step_s=60.0, reset_s=10.0, init_s=100.0, call_s=20.0)


def test_env_that_stays_at_the_same_turn_is_reported_as_slow_and_then_as_over() -> None:
    detector = HangDetector(FAULTS)
    found = [detector.sample(float(now_s), 10.0, "step", 3, word=7) for now_s in range(0, 61, 10)]
    assert found[:3] == [None] * 3
    assert found[3] == Late("step", 3, 30.0, 60.0) and not found[3].expired
    assert found[4:6] == [None] * 2
    assert found[6] is not None and found[6].expired


def test_worker_that_goes_on_is_never_late_however_long_its_batch_takes() -> None:
    detector = HangDetector(FAULTS)
    assert not any(detector.sample(50.0 * turn, 50.0, "step", turn % 16, turn) for turn in range(1000))


def test_rest_between_two_steps_does_not_count() -> None:
    detector = HangDetector(FAULTS)
    assert detector.sample(0.0, 59.0, "step", 0, 1) is None
    detector.rest()
    assert detector.sample(1000.0, 59.0, "step", 0, 1) is None
    assert detector.sample(1059.0, 59.0, "step", 0, 1) == Late("step", 0, 59.0, 60.0)  # slow


def test_env_that_is_slow_again_after_a_rest_is_reported_again() -> None:
    detector = HangDetector(FAULTS)
    for begin_s in (0.0, 1000.0):
        found = [detector.sample(begin_s + now_s, 10.0, "step", 3, word=7) for now_s in range(0, 41, 10)]
        assert [late is not None for late in found] == [False, False, False, True, False]
        detector.rest()


def test_each_kind_has_its_own_time() -> None:
    for kind, limit_s in {"init": 100.0, "reset": 10.0, "step": 60.0, "call": 20.0}.items():
        detector = HangDetector(FAULTS)
        detector.sample(0.0, limit_s, kind, 0, 1)
        early, late = (detector.sample(at_s, limit_s, kind, 0, 1) for at_s in (limit_s - 0.1, limit_s))
        assert (early is None or not early.expired) and late is not None and late.expired


def test_late_sample_counts_for_twice_the_planned_interval() -> None:
    detector = HangDetector(Faults(step_s=0.7))
    assert detector.sample(0.0, 0.1, "step", 0, 1) is None
    assert detector.sample(1.9, 0.1, "step", 0, 1) is None  # hub and worker were frozen together
    assert detector.sample(3.8, 0.1, "step", 0, 1) is None
    assert detector.sample(3.9, 0.1, "step", 0, 1) is None
    late = detector.sample(5.0, 0.1, "step", 0, 1)
    assert late is not None and late.expired and math.isclose(late.waited_s, 0.7)


def test_no_time_passes_while_the_hub_is_stopped() -> None:
    now_s = 100.0
    clock = Clock(lambda: now_s)
    planned_s = clock.now_s() + 0.1
    now_s = 100.5
    assert clock.woke(planned_s) == 0.0 and clock.now_s() == 100.5
    now_s = 160.5
    assert math.isclose(clock.woke(100.6), 59.9) and math.isclose(clock.now_s(), 100.6)
    now_s = 161.0
    assert math.isclose(clock.now_s(), 101.1)
    assert clock.woke(math.inf) == 0.0


def test_largest_lag_of_the_last_minute_is_reported() -> None:
    now = [100.0]
    clock = Clock(lambda: now[0])
    assert clock.lag_s() == 0.0
    for now[0], planned_s in [(100.0, 99.5), (110.0, 109.0), (120.0, 119.75), (130.0, 129.9), (140.0, 141.0)]:
        assert clock.woke(planned_s) == 0.0
    lags = []
    for now[0] in (150.0, 169.1, 180.0, 189.95):
        lags.append(round(clock.lag_s(), 2))
    assert lags == [1.0, 0.25, 0.1, 0.0]


def test_time_in_which_something_was_handled_is_lag() -> None:
    now_s = 100.0
    clock = Clock(lambda: now_s)
    clock.add_lag(100.0, 4.0)
    assert clock.lag_s() == 4.0
    now_s = 101.0
    clock.add_lag(101.0, 0.5)
    assert clock.lag_s() == 4.0
    now_s = 161.0
    assert clock.lag_s() == 0.5
    now_s = 162.0
    assert clock.lag_s() == 0.0


def test_time_in_which_the_hub_was_stopped_is_no_lag() -> None:
    now_s = 110.0
    clock = Clock(lambda: now_s)
    assert clock.woke(100.0) == 10.0 and clock.lag_s() == 0.0
